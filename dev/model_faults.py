"""Faults in model/ and its options, for dev/plant_faults.py: the same form as kernel_faults.py."""
LAYERS, GPT, SHAPE = "model/layers.cpp", "model/gpt.cpp", "model/shape.cpp"
TABLE, HF, BLOCK = "model/activations.cpp", "model/huggingface.cpp", "model/block.cpp"
ATTENTION = "model/attention.cpp"
STAGE, STATE_HEADER = "model/stage.cpp", "model/state.h"
HF_CONFIG, OPTIONS = "training/models/hf_config.cpp", "runtime/config/model_options.cpp"

FAULTS = [
    # ---- layers
    (LAYERS, "the tied head's gradient is lost", ".accumulate_dwte = has_head_part || x.accumulate",
     ".accumulate_dwte = x.accumulate"),
    (LAYERS, "an untied embedding keeps the gradient of the previous step",
     ".accumulate_dwte = has_head_part || x.accumulate", ".accumulate_dwte = true"),
    (LAYERS, "the norms' epsilon is GPT-2's", "         .eps = float(x.shape->norm_eps)},\n        {w.weight.name});",
     "         .eps = 1e-5f},\n        {w.weight.name});"),
    (LAYERS, "QK norm's epsilon is GPT-2's", ".eps = float(x.shape->norm_eps),\n         .positions",
     ".eps = 1e-5f,\n         .positions"),
    (BLOCK, "the backward pass does not undo QK norm and RoPE",
     "    heads_backward(x, w.q_norm, w.k_norm, a.qkv, a.attn, d.dqkv);\n", ""),
    (LAYERS, "recomputation rotates queries and keys that were kept",
     "if (!x.shape->changes_heads() || x.has(qkv)) return;", "if (!x.shape->changes_heads()) return;"),
    (ATTENTION, "the backward pass of attention sees all keys",
     "            .lse = attn.lse.view.as<float>(),\n            .batch = x.batch,\n            .seq_len = x.seq_len,\n"
     "            .n_head = x.shape->n_head,\n            .n_kv_head = x.shape->kv_heads(),\n"
     "            .head_size = x.shape->head_size(),\n            .scale = float(x.shape->attention_scale()),\n"
     "            .window = x.shape->window(x.stream.layer),",
     "            .lse = attn.lse.view.as<float>(),\n            .batch = x.batch,\n            .seq_len = x.seq_len,\n"
     "            .n_head = x.shape->n_head,\n            .n_kv_head = x.shape->kv_heads(),\n"
     "            .head_size = x.shape->head_size(),\n            .scale = float(x.shape->attention_scale()),\n"
     "            .window = 0,"),
    (ATTENTION, "queries are kept instead of keys", "qkv.from(channels - kept).data", "qkv.data"),
    (LAYERS, "all tokens are decoded at position 0",
     ".channels = wte.weight.cols,\n         .positions = x.decode ? x.decode->positions : nullptr",
     ".channels = wte.weight.cols,\n         .positions = nullptr"),
    (LAYERS, "all tokens are rotated as at position 0",
     ".eps = float(x.shape->norm_eps),\n         .positions = x.decode ? x.decode->positions : nullptr",
     ".eps = float(x.shape->norm_eps),\n         .positions = nullptr"),
    (ATTENTION, "the first sequence's cache is filled", "x.cache->sequence(x.stream.layer, x.prefilled)",
     "x.cache->sequence(x.stream.layer, 0)"),
    (LAYERS, "the z-loss is forgotten", ".z_loss = head.z_loss,", ".z_loss = 0,"),
    (LAYERS, "logits are not capped", ".softcap = float(x.shape->final_softcap),", ".softcap = 0,"),
    (LAYERS, "relu2's derivative is taken from what is not there",
     "function == ActivationFunction::relu2 ? mlp.act.view : mlp.fc.view}", "mlp.fc.view}"),
    (LAYERS, "a gate's gradient is computed in place of attention's", "gated ? dact : dfc", "dfc"),
    # ---- the model
    (STAGE, "a document begins after its token", "if (position == 0 || tokens[row] == s.options.document_token) first",
     "if (position == 0 || tokens[row - 1] == s.options.document_token) first"),
    (STAGE, "documents continue from one sequence to the next", "if (position == 0 || tokens[row] ==",
     "if (row == 0 || tokens[row] =="),
    (STAGE, "the embedding's norm is left out of the backward pass",
     "    if (s.options.shape.embedding_norm) {\n        dembedding =", "    if (false) {\n        dembedding ="),
    (STAGE, "the head's gradients are not reduced",
     "        if (!is_in(s.layout.input_buckets, bucket)) end_grads(s, bucket, micro);\n", "        ;\n"),
    ("model/inference.cpp", "the logits that are read are not capped",
     "cap > 0 ? cap * std::tanh(logit / cap) : logit", "logit"),
    (STATE_HEADER, "the head shares the blocks' slots",
     "bucket == layout.bucket_of_head() ? kSlots - 1 : 1 + bucket % 2", "1 + bucket % 2"),
    (TABLE, "attention's gradient has the width of the residual stream",
     "std::max(per_channel(), per_attention())", "per_channel()"),
    (TABLE, "attention's output has the width of the residual stream",
     "{\"attn\", kept, &S::per_attention,", "{\"attn\", kept, &S::per_channel,"),
    (TABLE, "no memory is allocated for the gate", "if_any(shape.keeps_pre_activation(), shape.fc_channels())",
     "if_any(shape.keeps_pre_activation(), shape.hidden())"),
    # ---- shapes
    (SHAPE, "every layer has the window", "== 'S' ? sliding_window : 0", "!= 'X' ? sliding_window : 0"),
    (SHAPE, "Llama 3's scaling is inverted", "(1 - unscaled) * frequency / rope.factor + unscaled",
     "unscaled * frequency / rope.factor + (1 - unscaled)"),
    (SHAPE, "YaRN's bounds are swapped", "scaled * frequency / rope.factor + (1 - scaled)",
     "(1 - scaled) * frequency / rope.factor + scaled"),
    (SHAPE, "YaRN's attention factor is left out", "0.1 * std::log(rope.factor) + 1", "1"),
    (SHAPE, "linear scaling multiplies", "case RopeScaling::linear: return frequency / rope.factor;",
     "case RopeScaling::linear: return frequency * rope.factor;"),
    # ---- Hugging Face
    (HF, "keys and values are swapped", "case Part::key: return {queries, keys};",
     "case Part::key: return {queries + keys, keys};"),
    (HF, "gate and up are swapped", "case Part::gate: return {0, shape.hidden()};",
     "case Part::gate: return {shape.hidden(), shape.hidden()};"),
    (HF, "a rank's piece of a part begins too early", "tensor.first = first - begin;", "tensor.first = first;"),
    (HF_CONFIG, "transformers 5's rope_parameters are not read",
     'hf.has("rope_parameters") ? "rope_parameters" : "rope_scaling"', '"rope_scaling"'),
    (HF_CONFIG, "a given number of key heads is replaced by that of query heads",
     'hf.size_or("num_key_value_heads"', 'hf.size_or("num_key_value_head"'),
    (HF_CONFIG, "the head's size is not read", 'hf.size_or("head_dim"', 'hf.size_or("head_size"'),
    (OPTIONS, "the family overrides sizes", "        m.*size = model.*size;\n", ""),
]
