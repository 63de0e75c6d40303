// The learning rate as a function of the step.
#pragma once

#include "runtime/config/config.h"

// The rate of step 1 .. train.max_steps. With lr = optim.learning_rate, final = lr * schedule.final_lr_fraction:
// warm-up (step <= warmup_steps): lr step / warmup_steps; afterwards, with p = (step - warmup) / (max_steps - warmup),
//   cosine    final + (lr - final) (1 + cos(pi p)) / 2             (Loshchilov, Hutter, arXiv 1608.03983, eq. 5)
//   linear    final + (lr - final) (1 - p)
//   wsd       lr until the last cooldown_fraction of max_steps, then with q = 0 .. 1 over those steps
//             final + (lr - final) (1 - sqrt(q))                   (Haegele et al., arXiv 2405.18392, section 3)
//   constant  lr
//   cyclic    a triangle: from lr to final and back to lr every cycle_steps (Smith, arXiv 1506.01186, section 3)
// cosine, linear and wsd have the rate `final` exactly at the last step, if any step follows the warm-up.
double learning_rate(const Config& config, int step);

// Steps of wsd's cool-down: cooldown_fraction of max_steps, rounded, at least 1.
int cooldown_steps(const Config& config);
