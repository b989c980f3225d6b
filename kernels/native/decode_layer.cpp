// One decoder layer of a Llama-like target over few rows, in one call: norm, attention over a cache,
// residual, norm, SwiGLU, residual. What lies between the products is small, and as separate
// operations would take longer than the products themselves.
//
// Everything between the weights is float32, also where weights and cache are bfloat16.
//
// Letters: B sequences, T new rows of each, N = B * T rows, D width, H query heads, G key/value
// heads, E = H / G query heads per key head, d head width, L rows of the cache, F feed-forward width.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "few_rows.h"
#include "lanes.h"

namespace {

using paceline::multiply;
using Optional = std::optional<at::Tensor>;

constexpr int64_t kAttentionGrain = 1 << 15;

std::vector<float> floats(const at::Tensor& tensor) {
  const at::Tensor source = tensor.to(at::kFloat).contiguous();
  const float* from = source.const_data_ptr<float>();
  return std::vector<float>(from, from + source.numel());
}

void rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t width, float eps) {
  for (int64_t n = 0; n < rows; ++n, x += width, out += width) {
    const float scale = 1.0f / std::sqrt(paceline::dot(x, x, width) / width + eps);
    for (int64_t d = 0; d < width; ++d) out[d] = x[d] * scale * weight[d];
  }
}

// out [N, E] = x W^T + bias, in float32.
template <typename Weight>
void linear(const float* x, const at::Tensor& weight, const Optional& bias, float* out, int64_t rows) {
  const int64_t outputs = weight.size(0), width = weight.size(1);
  multiply(x, weight.const_data_ptr<Weight>(), out, rows, outputs, width);
  if (!bias) return;
  const Weight* add = bias->const_data_ptr<Weight>();
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t e = 0; e < outputs; ++e) out[n * outputs + e] += static_cast<float>(add[e]);
}

// Where the new rows go and what they see.
struct Places {
  const int64_t* rows_BT;
  const bool* visible_BTL;  // null: row t sees the cache up to its own row
  int64_t batch, count, length;

  bool sees(int64_t b, int64_t t, int64_t row) const {
    return visible_BTL ? visible_BTL[(b * count + t) * length + row] : row <= rows_BT[b * count + t];
  }
  int64_t end(int64_t b) const {
    if (visible_BTL) return length;
    return *std::max_element(rows_BT + b * count, rows_BT + (b + 1) * count) + 1;
  }
};

struct Heads {
  int64_t queries, keys, width;
  int64_t all() const { return queries + 2 * keys; }
};

// Norms and turns the query and key heads of qkv [N, all, d], and writes keys and values.
template <typename Weight>
void place_heads(float* qkv, const Heads& heads, const Places& places, const float* cos, const float* sin,
                 const Optional& query_norm, const Optional& key_norm, float eps, at::Tensor& keys,
                 at::Tensor& values) {
  const int64_t width = heads.width, half = width / 2;
  const std::vector<float> query_weight = query_norm ? floats(*query_norm) : std::vector<float>();
  const std::vector<float> key_weight = key_norm ? floats(*key_norm) : std::vector<float>();
  std::vector<float> turned(width);
  for (int64_t n = 0; n < places.batch * places.count; ++n) {
    const int64_t b = n / places.count;
    for (int64_t h = 0; h < heads.all(); ++h) {
      float* head = qkv + (n * heads.all() + h) * width;
      const bool is_query = h < heads.queries, is_value = h >= heads.queries + heads.keys;
      if (query_norm && !is_value)
        rms_norm(head, (is_query ? query_weight : key_weight).data(), head, 1, width, eps);
      if (!is_value) {
        for (int64_t d = 0; d < width; ++d)
          turned[d] = head[d] * cos[n * width + d] +
                      head[d < half ? d + half : d - half] * sin[n * width + d];
        std::copy(turned.begin(), turned.end(), head);
      }
      if (is_query) continue;
      at::Tensor& cache = is_value ? values : keys;
      const int64_t group = h - heads.queries - (is_value ? heads.keys : 0);
      Weight* to = cache.mutable_data_ptr<Weight>() + b * cache.stride(0) + group * cache.stride(1) +
                   places.rows_BT[n] * cache.stride(2);
      for (int64_t d = 0; d < width; ++d) to[d] = static_cast<Weight>(head[d]);
    }
  }
}

// One group of one sequence: its E * T queries read the same keys and values, each once.
template <typename Weight>
void attend_group(const float* qkv, const Heads& heads, const Places& places, int64_t b, int64_t g,
                  float scale, const Weight* keys, const Weight* values, int64_t row_stride, float* out) {
  const int64_t per_key = heads.queries / heads.keys, width = heads.width;
  const int64_t count = per_key * places.count, end = places.end(b);
  // Whole lanes, so that a score's place in the sum does not depend on how many rows follow it.
  const int64_t padded = (end + paceline::kLanes - 1) / paceline::kLanes * paceline::kLanes;
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  std::vector<float> scores(count * padded, kHidden), row(width);
  std::vector<const float*> queries(count);
  for (int64_t q = 0; q < count; ++q)
    queries[q] = qkv + ((b * places.count + q / per_key) * heads.all() + g * per_key + q % per_key) * width;
  for (int64_t l = 0; l < end; ++l) {
    paceline::to_floats(keys + l * row_stride, row.data(), width);
    for (int64_t q = 0; q < count; ++q)
      if (places.sees(b, q / per_key, l))
        scores[q * padded + l] = scale * paceline::dot(queries[q], row.data(), width);
  }
  for (int64_t q = 0; q < count; ++q) paceline::softmax(scores.data() + q * padded, padded);
  std::vector<float> sums(count * width, 0.0f);
  for (int64_t l = 0; l < end; ++l) {
    paceline::to_floats(values + l * row_stride, row.data(), width);
    for (int64_t q = 0; q < count; ++q)
      paceline::add_scaled(scores[q * padded + l], row.data(), sums.data() + q * width, width);
  }
  for (int64_t q = 0; q < count; ++q) {
    const int64_t n = b * places.count + q / per_key, h = g * per_key + q % per_key;
    std::copy_n(sums.data() + q * width, width, out + (n * heads.queries + h) * width);
  }
}

template <typename Weight>
void attend(const float* qkv, const Heads& heads, const Places& places, float scale, const at::Tensor& keys,
            const at::Tensor& values, float* out) {
  const int64_t work = places.length * heads.width * places.count * (heads.queries / heads.keys);
  const int64_t grain = std::max<int64_t>(1, kAttentionGrain / std::max<int64_t>(1, work));
  at::parallel_for(0, places.batch * heads.keys, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / heads.keys, g = i % heads.keys;
      const int64_t from = b * keys.stride(0) + g * keys.stride(1);
      attend_group(qkv, heads, places, b, g, scale, keys.const_data_ptr<Weight>() + from,
                   values.const_data_ptr<Weight>() + from, keys.stride(2), out);
    }
  });
}

struct Layer {
  const at::Tensor &norm, &qkv, &out, &second_norm, &gate_up, &down;
  const Optional &qkv_bias, &out_bias, &gate_up_bias, &down_bias, &query_norm, &key_norm;
};

template <typename Weight>
void run(const Layer& layer, float* hidden, const Heads& heads, const Places& places, const float* cos,
         const float* sin, at::Tensor& keys, at::Tensor& values, float eps, float scale) {
  const int64_t rows = places.batch * places.count, width = layer.qkv.size(1);
  const int64_t inner = layer.down.size(1);
  std::vector<float> normed(rows * width), qkv(rows * layer.qkv.size(0));
  rms_norm(hidden, floats(layer.norm).data(), normed.data(), rows, width, eps);
  linear<Weight>(normed.data(), layer.qkv, layer.qkv_bias, qkv.data(), rows);
  place_heads<Weight>(qkv.data(), heads, places, cos, sin, layer.query_norm, layer.key_norm, eps, keys,
                      values);
  std::vector<float> attended(rows * heads.queries * heads.width);
  attend<Weight>(qkv.data(), heads, places, scale, keys, values, attended.data());
  linear<Weight>(attended.data(), layer.out, layer.out_bias, normed.data(), rows);
  for (int64_t i = 0; i < rows * width; ++i) hidden[i] += normed[i];

  rms_norm(hidden, floats(layer.second_norm).data(), normed.data(), rows, width, eps);
  std::vector<float> gate_up(rows * 2 * inner), product(rows * inner);
  linear<Weight>(normed.data(), layer.gate_up, layer.gate_up_bias, gate_up.data(), rows);
  for (int64_t n = 0; n < rows; ++n)
    paceline::silu_times(gate_up.data() + n * 2 * inner, gate_up.data() + (2 * n + 1) * inner,
                         product.data() + n * inner, inner);
  linear<Weight>(product.data(), layer.down, layer.down_bias, normed.data(), rows);
  for (int64_t i = 0; i < rows * width; ++i) hidden[i] += normed[i];
}

// The layer's output [B, T, D] for hidden [B, T, D]. keys and values [B, G, L, d] take the new rows
// at rows [B, T]; cos and sin [B, T, d], the first half of sin negated; visible bool [B, T, length].
at::Tensor decode_layer(const at::Tensor& hidden, const at::Tensor& norm, const at::Tensor& qkv,
                        const Optional& qkv_bias, const Optional& query_norm, const Optional& key_norm,
                        const at::Tensor& out, const Optional& out_bias, const at::Tensor& second_norm,
                        const at::Tensor& gate_up, const Optional& gate_up_bias, const at::Tensor& down,
                        const Optional& down_bias, const at::Tensor& cos, const at::Tensor& sin,
                        at::Tensor keys, at::Tensor values, const at::Tensor& rows,
                        const Optional& visible, int64_t length, double eps, double scale) {
  const Heads heads{out.size(1) / keys.size(3), keys.size(1), keys.size(3)};
  TORCH_CHECK(qkv.size(0) == heads.all() * heads.width, "qkv has ", qkv.size(0), " rows, the cache needs ",
              heads.all() * heads.width);
  TORCH_CHECK(keys.stride(3) == 1 && keys.strides() == values.strides(), "keys and values must lie alike");
  for (const at::Tensor* weight : {&qkv, &out, &gate_up, &down})
    TORCH_CHECK(weight->is_contiguous() && weight->scalar_type() == keys.scalar_type(),
                "weights must be contiguous and of the cache's dtype");
  const at::Tensor positions = rows.contiguous();
  const Optional seen = visible ? Optional(visible->contiguous()) : std::nullopt;
  TORCH_CHECK(!seen || seen->numel() == rows.numel() * length, "visible must be [B, T, length]");
  const Places places{positions.const_data_ptr<int64_t>(), seen ? seen->const_data_ptr<bool>() : nullptr,
                      rows.size(0), rows.size(1), length};
  const Layer layer{norm,     qkv,      out,          second_norm, gate_up,    down,
                    qkv_bias, out_bias, gate_up_bias, down_bias,   query_norm, key_norm};
  at::Tensor result = hidden.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  const at::Tensor cosines = cos.to(at::kFloat).contiguous(), sines = sin.to(at::kFloat).contiguous();
  const bool half = keys.scalar_type() == at::kBFloat16;
  TORCH_CHECK(half || keys.scalar_type() == at::kFloat, "float32 or bfloat16");
  (half ? run<c10::BFloat16> : run<float>)(layer, result.mutable_data_ptr<float>(), heads, places,
                                           cosines.const_data_ptr<float>(), sines.const_data_ptr<float>(),
                                           keys, values, static_cast<float>(eps),
                                           static_cast<float>(scale));
  return result.to(hidden.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(paceline, library) {
  library.def(
      "decode_layer(Tensor hidden, Tensor norm, Tensor qkv, Tensor? qkv_bias, Tensor? query_norm, "
      "Tensor? key_norm, Tensor out, Tensor? out_bias, Tensor second_norm, Tensor gate_up, "
      "Tensor? gate_up_bias, Tensor down, Tensor? down_bias, Tensor cos, Tensor sin, "
      "Tensor(a!) keys, Tensor(b!) values, Tensor rows, Tensor? visible, int length, float eps, "
      "float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(paceline, CPU, library) { library.impl("decode_layer", &decode_layer); }
