// Products of few rows with a weight, x W^T: every weight is read from memory once, whatever the
// number of rows. AVX2 and FMA, float32 accumulation.
//
// A tile is 4 rows of W by up to 3 rows of x, or 3 by 4: 12 accumulators of 8 floats in 16
// registers; nothing is packed. While a tile's rows of W lie in the first cache, all rows of x pass
// over them, and meanwhile the next tile's rows are fetched: otherwise memory would rest while the
// later rows of x are multiplied.
//
// Each row of x has the same sums whatever stands beside it.
//
// Letters: R rows of x, E rows of W, D width.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace paceline {

constexpr int64_t kTileInputs = 4;
constexpr int64_t kLanes = 8;
constexpr int64_t kLineBytes = 64;
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

// Lines [first, last) of what the next tile reads.
struct Ahead {
  const char* first;
  const char* last;
};

// OUTPUTS rows of W by INPUTS rows of x: the inner product of each pair.
template <typename Weight, int OUTPUTS, int INPUTS>
inline void tile(const float* x, const Weight* weight, int64_t width, float* out, int64_t out_stride,
                 Ahead ahead) {
  __m256 sums[OUTPUTS][INPUTS];
  for (int e = 0; e < OUTPUTS; ++e)
    for (int r = 0; r < INPUTS; ++r) sums[e][r] = _mm256_setzero_ps();
  const int64_t whole = width - width % kLanes;
  const int64_t steps = std::max<int64_t>(1, whole / kLanes);
  const int64_t lines = (ahead.last - ahead.first + kLineBytes - 1) / kLineBytes;
  const int64_t per_step = (lines + steps - 1) / steps;
  const char* next = ahead.first;
  for (int64_t d = 0; d < whole; d += kLanes) {
    for (int64_t i = 0; i < per_step && next < ahead.last; ++i, next += kLineBytes)
      _mm_prefetch(next, _MM_HINT_T0);
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
                       int64_t out_stride, Ahead ahead) {
  // Even groups: 5 rows are 3 + 2, since a group of 1 waits for its loads.
  int64_t groups = (rows + kTileInputs - 1) / kTileInputs;
  const int64_t share = (ahead.last - ahead.first) / groups / kLineBytes * kLineBytes + kLineBytes;
  for (int64_t r = 0; groups > 0; --groups) {
    const int64_t size = (rows - r + groups - 1) / groups;
    const Ahead part{ahead.first, std::min(ahead.first + share, ahead.last)};
    ahead.first = part.last;
    const float* from = x + r * width;
    float* to = out + r * out_stride;
    if constexpr (OUTPUTS < 4)
      if (size == 4) tile<Weight, OUTPUTS, 4>(from, weight, width, to, out_stride, part);
    if (size == 3) tile<Weight, OUTPUTS, 3>(from, weight, width, to, out_stride, part);
    if (size == 2) tile<Weight, OUTPUTS, 2>(from, weight, width, to, out_stride, part);
    if (size == 1) tile<Weight, OUTPUTS, 1>(from, weight, width, to, out_stride, part);
    r += size;
  }
}

template <typename Weight, int OUTPUTS>
void multiply_tiled(const float* x, const Weight* weight, float* out, int64_t rows, int64_t outputs,
                    int64_t width) {
  const int64_t tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, OUTPUTS * width * rows));
  at::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * OUTPUTS, outputs);
    for (int64_t e = begin * OUTPUTS; e < last;) {
      const int64_t count = last - e >= OUTPUTS ? OUTPUTS : 1;
      const Weight* after = weight + (e + count) * width;
      const Ahead ahead{reinterpret_cast<const char*>(after),
                        reinterpret_cast<const char*>(weight + std::min(e + 2 * count, last) * width)};
      if (count == OUTPUTS)
        all_inputs<Weight, OUTPUTS>(x, rows, weight + e * width, width, out + e, outputs, ahead);
      else
        all_inputs<Weight, 1>(x, rows, weight + e * width, width, out + e, outputs, ahead);
      e += count;
    }
  });
}

// out [R, E] = x [R, D] times weight [E, D] transposed.
template <typename Weight>
void multiply(const float* x, const Weight* weight, float* out, int64_t rows, int64_t outputs,
              int64_t width) {
  if (rows == 0) return;
  const int64_t groups = (rows + kTileInputs - 1) / kTileInputs;
  const bool wide = (rows + groups - 1) / groups == kTileInputs;
  (wide ? multiply_tiled<Weight, 3> : multiply_tiled<Weight, 4>)(x, weight, out, rows, outputs, width);
}

}  // namespace paceline
