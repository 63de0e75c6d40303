"""train_gpt plan: memory, layouts of ranks, and what a configuration leaves to the program."""
import json
import re

from trainer import ROOT, TrainerTest


class Plan(TrainerTest):
    def test_plan_needs_no_data(self):
        said = self.run_trainer("plan", self.write_config(data_train="nothing"))
        self.assertIn("total", said)
        self.assertIn("Hugging Face       GPT2LMHeadModel\n", said)
        self.assertIn("Hugging Face       cannot export to Hugging Face: no supported architecture",
                      self.run_trainer("plan", self.write_config(model_norm="rmsnorm")))
        # wte + wpe + 2 blocks of (norms 4 C, attention 4 C^2 + 4 C, MLP 8 C^2 + 5 C) + the final norm, C = 48
        c, padded_vocab = 48, 384
        self.assertIn(str((padded_vocab + 24) * c + 2 * (12 * c * c + 13 * c) + 2 * c), said.replace(",", ""))

    def test_plan_and_training_print_the_ramps(self):
        config = self.write_config(train_batch_ramp=[{"until_step": 3, "total_batch_tokens": 60},
                                                     {"until_step": 5, "total_batch_tokens": 240}],
                                   train_seq_ramp=[{"until_step": 9, "seq_len": 4}])
        self.assertRegex(self.run_trainer("plan", config),
                         r"\nmicro-steps +1 per step of 60 tokens until step 3"
                         r"\nmicro-steps +4 per step of 240 tokens until step 5"
                         r"\nmicro-steps +2 per step of 120 tokens\nsequence length +4 until step 9\n")
        said = self.run_trainer(config)
        self.assertIn("run: steps 1 to 20, 60 to 120 tokens each\n", said)
        self.assertIn(f"trained  20 steps, {3 * 60 + 2 * 240 + 15 * 120:,} tokens in ", said)
        self.assertIn("60 to 120 tokens per step", self.run_trainer("inspect", "run"))

    def test_plan_and_training_name_the_optimizer_of_each_tensor(self):
        groups = [{"tensors": "vector", "lr_scale": 2, "beta2": 0.97},
                  {"tensors": "h.0.fc.weight", "weight_decay": 0}]
        config = self.write_config(optim_groups=groups, optim_name="lion", optim_learning_rate=0.001)
        said = self.run_trainer("plan", config)
        self.assertRegex(said, r"lion +rate 0\.001, weight decay 0\.1: \d+ tensors, \d+ parameters\n    wte\n    wpe\n")
        self.assertRegex(said, r"lion +rate 0\.001, weight decay 0: 1 tensors, \d+ parameters\n    h\.\*\.fc\.weight\n")
        self.assertRegex(said,
                         r"lion +rate 0\.002, weight decay 0, beta2 0\.97: \d+ tensors, \d+ parameters\n    norm_f")
        self.assertRegex(self.run_trainer(config), r"update   lion of \d+ tensors\n")
        wrong = self.write_config(optim_groups=[{"tensors": "h.*.fc"}])
        self.assertIn('optim.groups: no tensor of the model is "h.*.fc"', self.run_trainer("plan", wrong, expect=78))

    def test_plan_predicts_the_speed_of_the_given_machine(self):
        config = self.write_config(train_total_batch_tokens=16 * 60)
        self.assertNotIn("predicted", self.run_trainer("plan", config))
        for options, words in (
                (["--gpus", 8, "--gpu", "B200", "--nvlink", "800GB/s", "--net", "800Gb/s", "--gpus-per-node", 4],
                 "predicted for 8 HGX B200 on 2 nodes; NVLink 800 GB/s, network 100 GB/s"),
                (["--gpus", 16, "--gpu", "rtx4090"],
                 "predicted for 16 GeForce RTX 4090 on 2 nodes; PCIe 32 GB/s, network 50 GB/s"),
                (["--gpus", 8], "predicted for 8 H100 SXM on 1 node; NVLink 450 GB/s per GPU")):
            self.assertIn(words, self.run_trainer("plan", config, *options))

    def test_plan_of_a_grid(self):
        """Without --gpus, of the smallest grid."""
        config = self.write_config(parallel_tensor=2, parallel_pipeline=2, model_n_head=4,
                                   train_total_batch_tokens=12 * 60)
        self.assertRegex(self.run_trainer("plan", config), r"micro-steps +12 per step")
        said = self.run_trainer("plan", config, "--gpus", 12, "--gpus-per-node", 3)
        self.assertRegex(said, r"micro-steps +4 per step")
        self.assertRegex(said, r"\n +3 +2 +1 +2\* +0 .* configured\n")
        self.assertIn("* warning: GPUs of different nodes divide a layer", said)
        said = self.run_trainer("plan", config, "--gpus", 9, "--gpus-per-node", 9, expect=78)
        self.assertIn("ranks (9) must be a multiple", said)

    def layouts(self, *options, **changes):
        """The rows of plan's list: data, pipeline, context, tensor, ZeRO, GiB, six times in ms, tokens per second."""
        said = self.run_trainer("plan", self.write_config(**changes), *options)
        rows = re.findall(r"^ *\d+ +\d+ +\d+ +\d+[* ] +[\d. ]+(?= %)", said, re.M)
        return said, [[float(cell) for cell in row.replace("*", "").split()][:-1] for row in rows]

    def test_plan_lists_the_fastest_layouts(self):
        said, rows = self.layouts("--gpus", 4, "--gpu", "h200", "--nodes", 2, model_n_head=4,
                                  train_total_batch_tokens=8 * 60)
        self.assertIn("on 2 nodes", said)
        self.assertEqual(len(rows), len({tuple(row[:5]) for row in rows}))
        # The first ten, and the configured grid with all ZeRO stages.
        self.assertEqual([row[4] for row in sorted(rows) if row[:4] == [4, 1, 1, 1]], [0, 1, 2, 3])
        self.assertEqual([row for row in rows[10:] if row[:4] != [4, 1, 1, 1]], [])
        self.assertGreaterEqual(len(rows), 10)
        self.assertRegex(said, r"\n +4 +1 +1 +1 +0 .*  configured\n")
        self.assertEqual(said.count("configured\n"), 1)
        steps = [row[11] for row in rows]
        self.assertTrue(all(a <= 1.002 * b for a, b in zip(steps, steps[1:])), steps)  # 0.1 % do not decide
        for data, pipeline, context, tensor, zero, _, compute, _, _, exposed, bubble, step, tokens in rows:
            self.assertEqual(data * pipeline * context * tensor, 4)
            self.assertFalse(zero == 3 and pipeline > 1)
            self.assertAlmostEqual(compute + exposed + bubble, step, delta=0.03)
            self.assertAlmostEqual(8 * 60 / tokens * 1e3, step, delta=0.02)
        self.assertEqual([row for row in rows if row[1] == 1 and row[10] > 0], [])

    def test_plan_names_what_does_not_fit(self):
        # A rank holds 16 bytes per parameter at ZeRO 0: 176 GiB of 11.8 billion, two bytes fewer than the H200's.
        model = dict(model_n_layer=40, model_n_head=40, model_n_embd=5120, train_total_batch_tokens=60 * 8)
        said, rows = self.layouts("--gpus", 8, "--gpu", "h200", **model)
        self.assertRegex(said, r"\d+ layouts of 8 H200 SXM; \d+ need more than the usable memory of 141 GiB")
        self.assertGreater(len(rows), 3)
        self.assertEqual(said.count("too large\n"), sum(row[5] > 0.94 * 141 for row in rows))
        self.assertIn("configured  too large\n", said)
        said, _ = self.layouts("--gpus", 2, "--gpu", "rtx4090", **model)
        self.assertRegex(said, r"the smallest, data \d, .*, needs [\d.]+ GiB: .*gradients [\d.]+")

    def test_plan_of_the_options_for_nodes(self):
        config = self.write_config(train_total_batch_tokens=8 * 60)
        self.assertIn("multiple of --nodes 3", self.run_trainer("plan", config, "--gpus", 8, "--nodes", 3, expect=64))
        self.run_trainer("plan", config, "--gpus", 8, "--nodes", 2, "--gpus-per-node", 4, expect=64)
        self.assertIn("8 H100 SXM on 2 nodes", self.run_trainer("plan", config, "--gpus", 8, "--nodes", 2))

    def test_plan_of_stages(self):
        config = self.write_config(parallel_pipeline=2, parallel_pipeline_schedule="interleaved", model_n_layer=7,
                                   parallel_pipeline_layers=[1, 3, 1, 2])
        said = self.run_trainer("plan", config)
        channels, padded_vocabulary, positions = 48, 384, 24
        layer, table = 12 * channels**2 + 13 * channels, padded_vocabulary * channels
        stages = re.findall(r"^stage (\d) +(\d+) bytes, (\d+) parameters, layers (.*)$", said, re.M)
        self.assertEqual([(int(number), int(parameters), layers) for number, _, parameters, layers in stages],
                         [(0, 2 * layer + table + positions * channels, "0 to 0, 4 to 4"),
                          (1, 5 * layer + table + 2 * channels, "1 to 3, 5 to 6")])
        self.assertLess(int(stages[0][1]), int(stages[1][1]))
        self.assertTrue(said.startswith("stage 1 of 0 to 1 needs the most memory:\n"))
        self.assertEqual(re.search(r"^total +(\d+) bytes", said, re.M)[1], stages[1][1])

    def test_plan_finds_layers_that_fit(self):
        """The first stage keeps the activations of three micro-steps, the last stage of one."""
        changes = dict(parallel_pipeline=3, model_n_layer=9, train_total_batch_tokens=60 * 8)

        def stages(*options, **more):
            said = self.run_trainer("plan", self.write_config(**changes, **more), *options)
            found = re.findall(r"^stage \d +(\d+) bytes, \d+ parameters, layers (\d+) to (\d+)$", said, re.M)
            return said, max(int(row[0]) for row in found), [int(row[2]) - int(row[1]) + 1 for row in found]

        _, most, layers = stages()
        usable = 0.97 * most
        machine = self.dir / "small.json"
        machine.write_text(json.dumps({"memory_gib": usable / 0.94 / 2**30}))
        said, unlimited, _ = stages("--gpus", 3, "--gpu", machine, "--gpus-per-node", 3)
        self.assertEqual(unlimited, most)  # of the configured layers
        row, = re.findall(r"^ +1 +3 +1 +1 +0 .*$", said, re.M)
        self.assertIn("configured, layers [", row)
        fitting = json.loads(re.search(r"layers (\[.*\])", row)[1])
        self.assertNotEqual(fitting, layers)
        self.assertLess(fitting[0], layers[0])
        _, least, given = stages(parallel_pipeline_layers=fitting)
        self.assertEqual(given, fitting)
        self.assertLessEqual(least, usable)
        self.assertAlmostEqual(float(row.split()[5]), least / 2**30, delta=0.05)
        # With twice the memory, the fastest layers.
        machine.write_text(json.dumps({"memory_gib": 2 * most / 2**30}))
        said, _, _ = stages("--gpus", 3, "--gpu", machine, "--gpus-per-node", 3)
        self.assertRegex(said, r"\n +1 +3 +1 +1 +0 .* configured\n")

    def test_plan_chooses_an_open_micro_batch_and_recompute_level(self):
        """Starting a layer's kernels costs this small model more than recomputing all of it."""
        flags = ("--gpus", 1, "--gpu", "machine.json")
        changes = dict(train_total_batch_tokens=20 * 48)

        def plan(memory, batch, level):
            (self.dir / "machine.json").write_text(json.dumps(
                {"flops_per_s": 1e15, "memory_bytes_per_s": 1e13, "memory_gib": memory / 0.94 / 2**30}))
            said, rows = self.layouts(*flags, train_batch_size=batch, train_recompute=level, **changes)
            return said, int(re.search(r"^total +(\d+) bytes", said, re.M)[1])

        bytes_of = {(batch, level): plan(1e12, batch, level)[1] for batch in (48, 24, 12, 6, 3, 1)
                    for level in ("none", "gelu", "norm", "block")}
        self.assertEqual(len(set(bytes_of.values())), len(bytes_of))
        for memory in [1e12, *(total - 1 for total in bytes_of.values())]:
            fitting = [choice for choice, total in bytes_of.items() if total <= memory]
            batch, level = fitting[0] if fitting else min(bytes_of, key=bytes_of.get)
            said, total = plan(memory, 0, "auto")
            self.assertEqual(total, bytes_of[batch, level])
            note = "" if fitting else "  too large"
            self.assertRegex(said, rf"  configured{note}, batch {batch}, recompute {level}\n")
            said, total = plan(memory, 0, "norm")
            fitting = [one for one in bytes_of if bytes_of[one] <= memory and one[1] == "norm"]
            self.assertEqual(total, bytes_of[fitting[0] if fitting else (1, "norm")])
            self.assertNotIn(", recompute", said)

    def test_plan_compares_recomputation_with_smaller_micro_batches(self):
        """GPT-2 774M on 24 GiB, against all choices: 0.1 ms per layer and micro-step, and the recomputed tensors at
        1008 GB/s."""
        config, layers, channels, size, tokens = ROOT / "configs/gpt2_774M.json", 36, 1280, 2, 2**19

        def plan(batch, level):
            said = self.run_trainer("plan", config, "--gpus", 1, "--gpu", "rtx4090", "--set",
                                    f"train.batch_size={batch}", "--set", f"train.recompute={level}")
            row = re.search(r"^ +1 +1 +1 +1 +0 .*$", said, re.M)[0]
            return int(re.search(r"^total +(\d+) bytes", said, re.M)[1]), float(row.split()[11]) / 1e3, row

        seconds = {}
        for batch in (1, 2, 4, 8, 16, 32, 64):
            for level, moved in (("none", 0), ("gelu", 8), ("norm", 12), ("block", 12)):
                total, step, row = plan(batch, level)
                if total <= 0.94 * 24 * 2**30:
                    overhead = layers * (1e-4 * tokens / batch / 1024 + tokens * moved * channels * size / 1008e9)
                    seconds[batch, level] = step + overhead
        batch, level = min(seconds, key=seconds.get)
        self.assertGreater(len(seconds), 4)
        self.assertTrue(plan(0, "auto")[2].endswith(f", batch {batch}, recompute {level}"), seconds)
