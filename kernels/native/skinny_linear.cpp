// y = x W^T (+ bias) for few rows of x, the shape of decoding and verification: every weight is
// read from memory once, whatever the number of rows. AVX2 and FMA, float32 accumulation.
//
// A tile is 4 rows of W by up to 3 rows of x, 12 accumulators of 8 floats in 16 registers; nothing
// is packed. While a tile's 4 rows of W lie in the first cache, all rows of x pass over them.
//
// Letters: R rows of x, E rows of W, D width.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kTileOutputs = 4;
constexpr int64_t kTileInputs = 3;
constexpr int64_t kLanes = 8;
// Multiplications that are worth waking another thread for.
constexpr int64_t kGrain = 1 << 16;

inline __m256 load_lanes(const float* from) { return _mm256_loadu_ps(from); }

inline __m256 load_lanes(const c10::BFloat16* from) {
  // A bfloat16 is the upper half of a float32.
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline float sum_lanes(__m256 lanes) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// OUTPUTS rows of W by INPUTS rows of x: the inner product of each pair.
template <typename Weight, int OUTPUTS, int INPUTS>
inline void tile(const float* x, const Weight* weight, int64_t width, float* out, int64_t out_stride) {
  __m256 sums[OUTPUTS][INPUTS];
  for (int e = 0; e < OUTPUTS; ++e)
    for (int r = 0; r < INPUTS; ++r) sums[e][r] = _mm256_setzero_ps();
  const int64_t whole = width - width % kLanes;
  for (int64_t d = 0; d < whole; d += kLanes) {
    __m256 inputs[INPUTS];
    for (int r = 0; r < INPUTS; ++r) inputs[r] = _mm256_loadu_ps(x + r * width + d);
    for (int e = 0; e < OUTPUTS; ++e) {
      const __m256 lanes = load_lanes(weight + e * width + d);
      for (int r = 0; r < INPUTS; ++r) sums[e][r] = _mm256_fmadd_ps(lanes, inputs[r], sums[e][r]);
    }
  }
  for (int e = 0; e < OUTPUTS; ++e)
    for (int r = 0; r < INPUTS; ++r) {
      float sum = sum_lanes(sums[e][r]);
      for (int64_t d = whole; d < width; ++d)
        sum += static_cast<float>(weight[e * width + d]) * x[r * width + d];
      out[r * out_stride + e] = sum;
    }
}

template <typename Weight, int OUTPUTS>
inline void all_inputs(const float* x, int64_t rows, const Weight* weight, int64_t width, float* out,
                       int64_t out_stride) {
  // Even groups: 4 rows are 2 + 2, since a group of 1 waits for its loads.
  int64_t groups = (rows + kTileInputs - 1) / kTileInputs;
  for (int64_t r = 0; groups > 0; --groups) {
    const int64_t size = (rows - r + groups - 1) / groups;
    const float* from = x + r * width;
    float* to = out + r * out_stride;
    if (size == 3) tile<Weight, OUTPUTS, 3>(from, weight, width, to, out_stride);
    if (size == 2) tile<Weight, OUTPUTS, 2>(from, weight, width, to, out_stride);
    if (size == 1) tile<Weight, OUTPUTS, 1>(from, weight, width, to, out_stride);
    r += size;
  }
}

template <typename Weight>
void multiply(const float* x, const Weight* weight, float* out, int64_t rows, int64_t outputs,
              int64_t width) {
  const int64_t tiles = (outputs + kTileOutputs - 1) / kTileOutputs;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, kTileOutputs * width * rows));
  at::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin * kTileOutputs; e < std::min(end * kTileOutputs, outputs);) {
      if (outputs - e >= kTileOutputs) {
        all_inputs<Weight, kTileOutputs>(x, rows, weight + e * width, width, out + e, outputs);
        e += kTileOutputs;
      } else {
        all_inputs<Weight, 1>(x, rows, weight + e * width, width, out + e, outputs);
        e += 1;
      }
    }
  });
}

at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
              "x [R, D] and weight [E, D] must share D");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "x and weight must be of one dtype");
  const at::Tensor inputs = x.to(at::kFloat).contiguous();
  const at::Tensor weights = weight.contiguous();
  at::Tensor out = at::empty({x.size(0), weight.size(0)}, inputs.options());
  const float* from = inputs.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  if (weight.scalar_type() == at::kBFloat16) {
    multiply(from, weights.const_data_ptr<c10::BFloat16>(), to, x.size(0), weight.size(0), x.size(1));
    return out.to(at::kBFloat16);
  }
  TORCH_CHECK(weight.scalar_type() == at::kFloat, "float32 or bfloat16 weights");
  multiply(from, weights.const_data_ptr<float>(), to, x.size(0), weight.size(0), x.size(1));
  return out;
}

}  // namespace

TORCH_LIBRARY(paceline, library) { library.def("skinny_linear(Tensor x, Tensor weight) -> Tensor"); }
TORCH_LIBRARY_IMPL(paceline, CPU, library) { library.impl("skinny_linear", &skinny_linear); }
