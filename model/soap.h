// SOAP (Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321, algorithm 3): Adam in the
// eigenbasis of Shampoo's preconditioner. The owner of a matrix keeps all of its state, in FP32.
//
// For a gradient G (m, n): L and R are running averages of G G^T and G^T G, M is the momentum, V the second moment of
// the rotated gradient. The rows of a basis Q are approximate eigenvectors, so a rotated matrix is QL G QR^T. A basis
// becomes the orthonormalized rows of Q L: one iteration of the power method, every soap_interval steps.
//
// As in the authors' implementation, the first step only finds the bases; V and M start with the second. The authors
// call an eigensolver in it; here kSoapInitialIterations iterations start from the identity.
#pragma once

#include "kernels/tensor.h"
#include "model/matrices.h"
#include "model/options.h"

inline constexpr int kSoapInitialIterations = 8;

MatrixMemory soap_memory(const GptOptions& options, const Matrix& matrix);
MatrixMemory soap_muon_memory(const GptOptions& options, const Matrix& matrix);

// Updates the state of an own matrix and replaces its gradient, FP32, by the direction of the step. The first step has
// no direction. If a gradient is not finite, no state changes.
void soap_direction(const GptState& s, size_t number, View values);

// The same for SOAP-Muon, which has a direction in each step: M = momentum M + (1 - momentum) G; U = (1 - momentum) G +
// momentum M, or M without Nesterov's momentum. U is rotated; V is the second moment of the rotated U, and the step is
// U / (sqrt(V) + eps), rotated back and orthogonalized as in Muon. The first step has no bases, so it is Muon's. The
// averages and the bases change after the direction.
//
// The source (github.com/KellerJordan/modded-nanogpt, records/track_3_optimization,
// results/20260609_soap_f1_auxb2_clean) divides by max(sqrt(V), eps), sorts the basis by eigenvalue before each update,
// and also limits the norms of steps.
void soap_muon_direction(const GptState& s, size_t number, View values);
