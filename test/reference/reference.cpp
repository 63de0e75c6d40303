#include "test/reference/reference.h"

#include <numeric>

#include "test/reference/tree_sum.h"
#include "test/reference/update_rules.h"

namespace ref {

// ---------------------------------------------------------------------------------------------------------------------
// Embedding.

// out[b, t, c] = wte[tokens[b, t], c] + wpe[p, c] with p = start(b) + t, or without wpe wte[tokens[b, t], c]; -0 for
// what other parts add
void embedding_forward(const ops::EmbeddingForward& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        const T* wte = op.wte.as<T>();
        const T* wpe = op.wpe.as<T>();
        for (int b = 0; b < op.batch; b++)
            for (int t = 0; t < op.seq_len; t++)
                for (int c = 0; c < op.channels; c++) {
                    size_t position = size_t(b) * op.seq_len + t;
                    const int token = op.tokens[position] - op.part.first_token;
                    const int at = op.positions ? op.positions[position] : op.starts.start(b, op.batch) + t;
                    double sum = -0.0;
                    if (0 <= token && token < op.part.tokens) sum += load(wte[size_t(token) * op.channels + c]);
                    if (wpe) sum += load(wpe[size_t(at) * op.channels + c]);
                    out[position * op.channels + c] = store<T>(sum);
                }
    });
}

// dwte[v, c] (+)= the sum of dout[b, t, c] over all (b, t) with tokens[b, t] = v;  dwpe[p, c] (+)= the sum
// over all (b, t) with start(b) + t = p
void embedding_backward(const ops::EmbeddingBackward& op) {
    by_storage(op.dout, [&]<class T>(T) {
        const T* dout = op.dout.as<T>();
        std::vector<double> dwte(size_t(op.vocab) * op.channels), dwpe(size_t(op.n_positions) * op.channels);
        for (int b = 0; b < op.batch; b++)
            for (int t = 0; t < op.seq_len; t++)
                for (int c = 0; c < op.channels; c++) {
                    size_t position = size_t(b) * op.seq_len + t;
                    double gradient = load(dout[position * op.channels + c]);
                    const int token = op.tokens[position] - op.first_token;
                    if (0 <= token && token < op.vocab) dwte[size_t(token) * op.channels + c] += gradient;
                    dwpe[size_t(op.starts.start(b, op.batch) + t) * op.channels + c] += gradient;
                }
        for (size_t i = 0; i < dwte.size(); i++) put(op.dwte[i], dwte[i], op.accumulate_dwte);
        for (size_t i = 0; op.dwpe && i < dwpe.size(); i++) put(op.dwpe[i], dwpe[i], op.accumulate);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Normalization. Missing weights are 1, missing biases 0.

// residual = inp + branch;  x = residual as stored, or inp without a branch
// mean = sum(x) / cols;  rstd = 1 / sqrt(sum((x - mean)^2) / cols + eps);  out = (x - mean) rstd weight + bias
// RMSNorm: the same with a mean of 0
void residual_norm_forward(const ops::ResidualNormForward& op) {
    by_storage(op.out, [&]<class T>(T) {
        const T *weight = op.weight.as<T>(), *bias = op.bias.as<T>();
        for (size_t i = 0; op.branch && i < size_t(op.rows) * op.cols; i++)
            op.residual.as<T>()[i] = store<T>(load(op.inp.as<T>()[i]) + load(op.branch.as<T>()[i]));
        for (int row = 0; row < op.rows; row++) {
            const T* x = (op.branch ? op.residual.as<T>() : op.inp.as<T>()) + size_t(row) * op.cols;
            T* out = op.out.as<T>() + size_t(row) * op.cols;
            double sum = 0, squares = 0;
            for (int c = 0; c < op.cols; c++) sum += load(x[c]);
            double mean = op.mean ? sum / op.cols : 0;
            for (int c = 0; c < op.cols; c++) squares += (load(x[c]) - mean) * (load(x[c]) - mean);
            double rstd = 1 / std::sqrt(squares / op.cols + op.eps);
            for (int c = 0; c < op.cols; c++)
                out[c] =
                    store<T>((load(x[c]) - mean) * rstd * (weight ? load(weight[c]) : 1) + (bias ? load(bias[c]) : 0));
            if (op.mean) op.mean[row] = float(mean);
            op.rstd[row] = float(rstd);
        }
    });
}

// With normed = (inp - mean) rstd and dnormed = dout weight, row by row:
//   dinp (+)= rstd (dnormed - average(dnormed) - normed average(dnormed normed))
// RMSNorm, with a constant mean of 0:
//   dinp (+)= rstd (dnormed - normed average(dnormed normed))
//   dweight (+)= sum over rows of dout normed;  dbias (+)= sum over rows of dout
void norm_backward(const ops::NormBackward& op) {
    by_storage(op.dinp, [&]<class T>(T) {
        const T* weight = op.weight.as<T>();
        std::vector<double> dweight(op.cols), dbias(op.cols);
        for (int row = 0; row < op.rows; row++) {
            const T* inp = op.inp.as<T>() + size_t(row) * op.cols;
            const T* dout = op.dout.as<T>() + size_t(row) * op.cols;
            T* dinp = op.dinp.as<T>() + size_t(row) * op.cols;
            double mean = op.mean ? op.mean[row] : 0, rstd = op.rstd[row];
            double average = 0, average_with_normed = 0;
            for (int c = 0; c < op.cols; c++) {
                double normed = (load(inp[c]) - mean) * rstd;
                double dnormed = load(dout[c]) * (weight ? load(weight[c]) : 1);
                if (op.mean) average += dnormed / op.cols;
                average_with_normed += dnormed * normed / op.cols;
                dweight[c] += load(dout[c]) * normed;
                dbias[c] += load(dout[c]);
            }
            for (int c = 0; c < op.cols; c++) {
                double normed = (load(inp[c]) - mean) * rstd;
                double dnormed = load(dout[c]) * (weight ? load(weight[c]) : 1);
                put(dinp[c], rstd * (dnormed - average - normed * average_with_normed), op.accumulate_dinp);
            }
        }
        for (int c = 0; c < op.cols; c++) {
            if (op.dweight) put(op.dweight[c], dweight[c], op.accumulate);
            if (op.dbias) put(op.dbias[c], dbias[c], op.accumulate);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Causal self-attention. Position t sees the positions first_visible_key(t) <= j <= t.

// The largest of 0, t - window + 1 and first_key[t].
int first_visible_key(int window, const int* first_key, int t) {
    int first = 0;
    if (window > 0) first = std::max(first, t - window + 1);
    if (first_key) first = std::max(first, first_key[t]);
    return first;
}
template <class Op> int first_visible_key(const Op& op, int b, int t) {
    return first_visible_key(op.window, op.first_key ? op.first_key + size_t(b) * op.seq_len : nullptr, t);
}

// softcap tanh(score / softcap) and its derivative; without a cap the score and 1.
double capped(double score, double softcap) { return softcap > 0 ? softcap * std::tanh(score / softcap) : score; }
double cap_derivative(double score, double softcap) {
    if (!(softcap > 0)) return 1;
    double tanh = std::tanh(score / softcap);
    return 1 - tanh * tanh;
}

// The factor that dropout applies to a probability; 1 without dropout.
double dropout_factor(const ops::DropoutMask& mask, int b, int head, int query, int key) {
    if (!mask) return 1;
    return mask.is_kept(mask.keys[b], head, query, key) ? 65536.0 / (65536.0 - mask.threshold) : 0;
}

// score[j] = capped(scale query[t] . key[j]);  lse = log(sum of exp(score));  out[t] = sum over j of factor
// exp(score[j] - lse) value[j]
void attention_forward(const ops::AttentionForward& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        const T* qkv = op.qkv.as<T>();
        QkvLayout at{op.seq_len, op.n_head, op.n_kv_head, op.head_size};
        std::vector<double> score(op.seq_len), sum(op.head_size);
        for (int b = 0; b < op.batch; b++)
            for (int h = 0; h < op.n_head; h++)
                for (int t = 0; t < op.seq_len; t++) {
                    const int first = first_visible_key(op, b, t);
                    for (int j = first; j <= t; j++) {
                        double product = dot(qkv + at.query(b, h, t), qkv + at.key(b, h, j), op.head_size);
                        score[j] = capped(op.scale * product, op.softcap);
                    }
                    double lse = log_sum_exp(score.data() + first, t + 1 - first);
                    std::fill(sum.begin(), sum.end(), 0.0);
                    for (int j = first; j <= t; j++) {
                        double p = dropout_factor(op.dropout, b, h, t, j) * std::exp(score[j] - lse);
                        for (int d = 0; d < op.head_size; d++) sum[d] += p * load(qkv[at.value(b, h, j) + d]);
                    }
                    for (int d = 0; d < op.head_size; d++) out[at.out(b, h, t) + d] = store<T>(sum[d]);
                    op.lse[at.lse(b, h, t)] = float(lse);
                }
    });
}

// Stores the row's keys and values at its position; then like the forward op, for this position alone.
void attention_decode(const ops::AttentionDecode& op) {
    by_storage(op.out, [&]<class T>(T) {
        const int size = op.head_size, group = op.n_head / op.n_kv_head;
        const size_t queries = size_t(op.n_head) * size, keys = size_t(op.n_kv_head) * size;
        for (int row = 0; row < op.rows; row++) {
            const auto& [sequence, position, first_key] = op.places[row];
            const T* query = op.qkv.as<T>() + size_t(row) * (queries + 2 * keys);
            auto kept = [&](int j) { return op.cache.as<T>() + (size_t(sequence) * op.capacity + j) * 2 * keys; };
            std::copy_n(query + queries, 2 * keys, kept(position));
            const int first = op.window > 0 ? std::max(first_key, position + 1 - op.window) : first_key;
            for (int h = 0; h < op.n_head; h++) {
                const size_t key = size_t(h / group) * size, value = keys + key;
                std::vector<double> score, sum(size);
                for (int j = first; j <= position; j++)
                    score.push_back(capped(op.scale * dot(query + size_t(h) * size, kept(j) + key, size), op.softcap));
                const double lse = log_sum_exp(score.data(), int(score.size()));
                for (int j = first; j <= position; j++)
                    for (int d = 0; d < size; d++)
                        sum[d] += std::exp(score[j - first] - lse) * load(kept(j)[value + d]);
                T* out = op.out.as<T>() + row * queries + size_t(h) * size;
                for (int d = 0; d < size; d++) out[d] = store<T>(sum[d]);
            }
        }
    });
}

// With p = exp(score - lse), for every query t of a head and key j that it sees:
//   dvalue[j] += factor p dout[t];  dp = factor dout[t] . value[j];
//   dscore = p (dp - dout[t] . out[t]) cap_derivative(scale query[t] . key[j])
//   dquery[t] += scale dscore key[j];  dkey[j] += scale dscore query[t]
void attention_backward(const ops::AttentionBackward& op) {
    by_storage(op.dqkv, [&]<class T>(T) {
        T* dqkv = op.dqkv.as<T>();
        const T* qkv = op.qkv.as<T>();
        const T* out = op.out.as<T>();
        QkvLayout at{op.seq_len, op.n_head, op.n_kv_head, op.head_size};
        std::vector<double> sums(at.row(op.batch, 0));
        for (int b = 0; b < op.batch; b++)
            for (int h = 0; h < op.n_head; h++)
                for (int t = 0; t < op.seq_len; t++) {
                    const T* query = qkv + at.query(b, h, t);
                    const T* dout = op.dout.as<T>() + at.out(b, h, t);
                    double dout_out = dot(dout, out + at.out(b, h, t), op.head_size);
                    for (int j = first_visible_key(op, b, t); j <= t; j++) {
                        const T* key = qkv + at.key(b, h, j);
                        double score = op.scale * dot(query, key, op.head_size);
                        double p = std::exp(capped(score, op.softcap) - op.lse[at.lse(b, h, t)]);
                        double factor = dropout_factor(op.dropout, b, h, t, j);
                        double dp = factor * dot(dout, qkv + at.value(b, h, j), op.head_size);
                        double dscore = p * (dp - dout_out) * cap_derivative(score, op.softcap);
                        for (int d = 0; d < op.head_size; d++) {
                            sums[at.value(b, h, j) + d] += factor * p * load(dout[d]);
                            sums[at.query(b, h, t) + d] += op.scale * dscore * load(key[d]);
                            sums[at.key(b, h, j) + d] += op.scale * dscore * load(query[d]);
                        }
                    }
                }
        for (size_t i = 0; i < sums.size(); i++) dqkv[i] = store<T>(sums[i]);
    });
}

// out = inp / (1 - threshold / 65536) where the mask keeps the element, else 0
void dropout(const ops::Dropout& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        const T* inp = op.inp.as<T>();
        for (size_t i = 0; i < op.elements; i++) {
            const size_t element = op.first + i;
            const bool kept = op.mask.is_kept(op.mask.keys[element / op.count], op.start + element % op.count);
            out[i] = store<T>(kept ? load(inp[i]) * 65536.0 / (65536.0 - op.mask.threshold) : 0);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// The update.

void elementwise_update(const ops::ElementwiseUpdate& op) {
    by_storage(op.param, [&]<class T>(T) {
        T* param = op.param.as<T>();
        if (op.grad_norm->non_finite_tensor >= 0) return;
        for (int i = 0; i < op.n_chunks; i++) {
            const ops::Chunk& chunk = op.chunks[i];
            for (int e = 0; e < chunk.count; e++) {
                const size_t place = chunk.begin + size_t(e), state_place = chunk.state_begin + size_t(e);
                double master = op.master.as<float>()[place], state[ops::kMaxStates] = {};
                for (int k = 0; k < ops::kMaxStates && op.state[k]; k++)
                    state[k] = op.state[k].as<float>()[state_place];
                ops::UpdateScalars scalars = op.scalars[chunk.group];
                if (op.trust_ratios) scalars.trust_ratio = op.trust_ratios[chunk.layer];
                update_element(op.rule, scalars, double(op.grad[place]) * op.grad_norm->scale, master, state);
                for (int k = 0; k < ops::kMaxStates && op.state[k]; k++)
                    op.state[k].as<float>()[state_place] = float(state[k]);
                op.master.as<float>()[place] = float(master);
                if (param) param[place] = store<T>(float(master));
            }
        }
    });
}

// out[index, 0] = sum of master^2,  out[index, 1] = sum of direction_of_layer()^2
void trust_sums(const ops::TrustSums& op) {
    for (int i = 0; i < op.n_chunks && op.grad_norm->non_finite_tensor < 0; i++) {
        const ops::Chunk& chunk = op.chunks[i];
        double *sums = op.out + 2 * chunk.index, state[ops::kMaxStates] = {};
        sums[0] = sums[1] = 0;
        for (size_t e = 0; e < size_t(chunk.count); e++) {
            for (int k = 0; k < ops::kMaxStates && op.state[k]; k++)
                state[k] = op.state[k].as<float>()[chunk.state_begin + e];
            const double master = op.master.as<float>()[chunk.begin + e],
                         g = double(op.grad[chunk.begin + e]) * op.grad_norm->scale;
            const double direction = direction_of_layer(op.rule, op.scalars[chunk.group], g, master, state);
            sums[0] += master * master, sums[1] += direction * direction;
        }
    }
}

// trust_ratio() of each layer's norms
void trust_ratios(const ops::TrustRatios& op) {
    for (int i = 0; i < op.n_layers && op.grad_norm->non_finite_tensor < 0; i++) {
        const ops::Layer& layer = op.layers[i];
        double weights = 0, directions = 0;
        for (int k = 0; k < layer.n_sums; k++) {
            weights += op.sums[2 * (layer.first + k * layer.stride)];
            directions += op.sums[2 * (layer.first + k * layer.stride) + 1];
        }
        const ops::UpdateScalars& s = op.scalars[layer.group];
        const double ratio = op.rule == OptimizerKind::adafactor
                                 ? factored_ratio(s, layer.count, std::sqrt(weights), std::sqrt(directions))
                                 : trust_ratio(op.rule, s, std::sqrt(weights), std::sqrt(directions));
        op.out[i] = layer.adapts ? float(ratio) : 1;
    }
}

// m and direction of each element: direct_element()
void momentum_direction(const ops::MomentumDirection& op) {
    for (int i = 0; i < op.n_chunks && op.grad_norm->non_finite_tensor < 0; i++) {
        const ops::Chunk& chunk = op.chunks[i];
        for (size_t e = 0; e < size_t(chunk.count); e++) {
            const double g = double(op.grad[chunk.begin + e]) * op.grad_norm->scale;
            double m = op.m ? op.m.as<float>()[chunk.state_begin + e] : 0;
            const double direction = direct_element(op.scalars[chunk.group], op.nesterov, g, m);
            put(op.direction, chunk.state_begin + e, op.m ? direction : g);
            if (op.m) op.m.as<float>()[chunk.state_begin + e] = float(m);
        }
    }
}

// master of each element: apply_element();  param = master as stored
void apply_direction(const ops::ApplyDirection& op) {
    for (int i = 0; i < op.n_chunks && op.grad_norm->non_finite_tensor < 0; i++) {
        const ops::Chunk& chunk = op.chunks[i];
        for (size_t e = 0; e < size_t(chunk.count); e++) {
            float& master = op.master.as<float>()[chunk.begin + e];
            const double direction = element(op.direction, chunk.state_begin + e);
            const bool decays = !op.cautious || direction * master >= 0;
            ops::UpdateScalars scalars = op.scalars[chunk.group];
            if (op.trust_ratios) scalars.learning_rate *= op.trust_ratios[chunk.layer];
            master = float(apply_element(scalars, decays, direction, double(master)));
            if (op.param) put(op.param, chunk.begin + e, master);
        }
    }
}

// out[i] = inp[i] / max(norm, eps),  norm = sqrt(sum of inp[i]^2)
void frobenius_normalize(const ops::FrobeniusNormalize& op) {
    double sum = 0;
    for (size_t i = 0; i < op.count; i++) sum += element(op.inp, i) * element(op.inp, i);
    for (size_t i = 0; i < op.count; i++) put(op.out, i, element(op.inp, i) / std::max(std::sqrt(sum), double(op.eps)));
}

// v[r] = beta2 v[r] + (1 - beta2) mean of inp[r, c]^2;  hat[r, c] = inp[r, c] / (sqrt(v[r]) + eps)
// out = norm hat / |hat|
void row_normalize(const ops::RowNormalize& op) {
    const size_t rows = size_t(op.rows), cols = size_t(op.cols);
    std::vector<double> hat(rows * cols);
    double squares = 0;
    for (size_t r = 0; r < rows; r++) {
        double sum = 0;
        for (size_t c = 0; c < cols; c++) sum += element(op.inp, r * cols + c) * element(op.inp, r * cols + c);
        const double v = double(op.beta2) * op.v[r] + double(op.one_minus_beta2) * sum / op.cols;
        op.v[r] = float(v);
        for (size_t c = 0; c < cols; c++) {
            hat[r * cols + c] = element(op.inp, r * cols + c) / (std::sqrt(v) + double(op.eps));
            squares += hat[r * cols + c] * hat[r * cols + c];
        }
    }
    for (size_t i = 0; i < hat.size(); i++) put(op.out, i, squares > 0 ? op.norm * hat[i] / std::sqrt(squares) : 0);
}

// adam_element() of each element
void adam_direction(const ops::AdamDirection& op) {
    for (size_t i = 0; i < op.count && op.grad_norm->non_finite_tensor < 0; i++) {
        double v = op.v[i];
        op.out[i] = float(adam_element<double>(op.scalars, op.m[i], op.grad[i], v));
        op.v[i] = float(v);
    }
}

// Gram-Schmidt: q[r] = x / |x|, where x = inp[r] - sum over s < r of (inp[r] q[s]) q[s], or the same of fallback[r]
void orthonormalize_rows(const ops::OrthonormalizeRows& op) {
    const size_t cols = size_t(op.cols);
    std::vector<std::vector<double>> q;
    for (size_t row = 0; row < size_t(op.rows); row++) {
        double norm = 0;
        std::vector<double> x;
        for (const float* source : {op.inp, op.fallback}) {
            if (norm > op.tolerance) break;
            x.assign(source + row * cols, source + (row + 1) * cols);
            for (size_t s = 0; s < 2 * row; s++) {  // twice each
                const std::vector<double>& other = q[s % row];
                const double component = std::inner_product(x.begin(), x.end(), other.begin(), 0.0);
                for (size_t c = 0; c < cols; c++) x[c] -= component * other[c];
            }
            norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
        }
        for (double& value : x) value = norm > 0 ? value / norm : 0;
        std::copy(x.begin(), x.end(), op.out + row * cols);
        q.push_back(x);
    }
}

// out[i] = alpha a[i] + beta b[i]
void scaled_add(const ops::ScaledAdd& op) {
    if (op.grad_norm && op.grad_norm->non_finite_tensor >= 0) return;
    for (size_t i = 0; i < op.count; i++) put(op.out, i, op.alpha * element(op.a, i) + op.beta * element(op.b, i));
}

// ---------------------------------------------------------------------------------------------------------------------
// Filling, casting and sums.

// out[i] = inp[i], rounded to nearest even
void cast(const ops::Cast& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        for (size_t i = 0; i < op.count; i++) out[i] = store<T>(element(op.inp, i));
    });
}

// out[r, c] = inp[r, c], rounded to nearest even
void cast_columns(const ops::CastColumns& op) {
    by_storage(op.out, [&]<class T>(T) {
        for (size_t r = 0; r < op.rows; r++)
            for (size_t c = 0; c < op.cols; c++)
                op.out.as<T>()[r * op.out_step + c] = store<T>(element(op.inp, r * op.inp_step + c));
    });
}

// out[t] += sum of values[e]^2 over the elements e of the chunks of tensor t. A number takes the place of bins.
void squared_sums(const ops::SquaredSums& op) {
    for (int i = 0; i < op.n_chunks; i++) {
        long double sum = 0;
        for (int e = 0; e < op.chunks[i].count; e++) {
            const long double value = op.values[op.chunks[i].begin + e];
            sum += value * value;
        }
        op.out[op.chunks[i].tensor] += double(sum);
    }
}

// norm = sqrt(sum of sums) / loss_scale;  scale = min(1, clip / (norm + 1e-6)) / loss_scale, without clipping 1 /
// loss_scale
void grad_norm_finish(const ops::GradNormFinish& op) {
    double sum = 0;
    int non_finite_tensor = -1;
    for (int i = 0; i < op.n_tensors; i++) {
        sum += op.sums[i];
        if (!std::isfinite(op.sums[i]) && non_finite_tensor < 0) non_finite_tensor = i;
    }
    double norm = std::sqrt(sum) / *op.loss_scale;
    double clipping = op.clip > 0 ? std::min(1.0, op.clip / (norm + 1e-6)) : 1;
    *op.out = {.norm = float(norm),
               .scale = float(clipping / *op.loss_scale),
               .non_finite_tensor = non_finite_tensor,
               .reserved = 0};
}

// Element i comes from the words of philox number i / 4. With words 0 and 1 as uniform numbers u, v, elements 0 and 1
// are sqrt(-2 log u) cos(2 pi v) and sqrt(-2 log u) sin(2 pi v); words 2 and 3 give elements 2 and 3 (Box, Muller, "A
// note on the generation of random normal deviates", Annals of Mathematical Statistics 29, 1958).
void normal_fill(const ops::NormalFill& op) {
    for (size_t j = 0; j < op.count; j++) {
        const size_t row = (op.skipped + j) / op.cols, col = (op.skipped + j) % op.cols;
        const size_t i = op.first + row * op.stride + col;
        Philox random = philox(op.seed, (uint64_t(RandomPurpose::init) << 32) + op.subsequence, i / 4);
        int pair = int(i % 4) / 2;
        double u = uniform_from_bits(random.word[2 * pair]);
        double v = uniform_from_bits(random.word[2 * pair + 1]);
        double radius = std::sqrt(-2 * std::log(u));
        double normal = radius * (i % 2 == 0 ? std::cos(2 * M_PI * v) : std::sin(2 * M_PI * v));
        op.out[j] = float(normal * op.deviation);
    }
}

// out[i] += inp[i], rounded to nearest even
void add(const ops::Add& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        for (size_t i = 0; i < op.count; i++) out[i] = store<T>(element(op.out, i) + element(op.inp, i));
    });
}

void sum_terms(const ops::SumTerms& op) {
    std::vector<double> terms(size_t(op.n));
    by_storage(op.out, [&]<class T>(T) {
        for (size_t i = 0; i < op.count; i++) {
            for (size_t term = 0; term < terms.size(); term++) terms[term] = element(op.terms, term * op.count + i);
            op.out.as<T>()[i] = store<T>(tree_sum(terms));
        }
    });
}

// out[i] = value
void fill(const ops::Fill& op) { std::fill(op.out, op.out + op.count, op.value); }

}  // namespace ref
