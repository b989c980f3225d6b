// Small loops over 8 lanes of float32. The order of every sum depends on its length alone.

#pragma once

#include <c10/util/BFloat16.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "few_rows.h"

namespace paceline {

inline float dot(const float* a, const float* b, int64_t width) {
  __m256 sum = _mm256_setzero_ps(), other = _mm256_setzero_ps();
  int64_t d = 0;
  for (; d + 2 * kLanes <= width; d += 2 * kLanes) {
    sum = _mm256_fmadd_ps(_mm256_loadu_ps(a + d), _mm256_loadu_ps(b + d), sum);
    other = _mm256_fmadd_ps(_mm256_loadu_ps(a + d + kLanes), _mm256_loadu_ps(b + d + kLanes), other);
  }
  float total = sum_lanes(_mm256_add_ps(sum, other));
  for (; d < width; ++d) total += a[d] * b[d];
  return total;
}

template <typename Number>
inline void to_floats(const Number* from, float* to, int64_t width) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) _mm256_storeu_ps(to + d, load_lanes(from + d));
  for (; d < width; ++d) to[d] = static_cast<float>(from[d]);
}

inline void add_scaled(float scale, const float* x, float* to, int64_t width) {
  const __m256 scales = _mm256_set1_ps(scale);
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes)
    _mm256_storeu_ps(to + d, _mm256_fmadd_ps(scales, _mm256_loadu_ps(x + d), _mm256_loadu_ps(to + d)));
  for (; d < width; ++d) to[d] += scale * x[d];
}

// e^x to about 1e-7 (relative): x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial in r (Cephes' expf).
// Below -87 the result is 0, above 88 it is about e^88.
inline __m256 exp_lanes(__m256 x) {
  const __m256 vanishes = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
  x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(88.0f)), _mm256_set1_ps(-87.0f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 y = _mm256_set1_ps(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f})
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(factor));
  y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(vanishes, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

inline float exp_one(float x) { return _mm256_cvtss_f32(exp_lanes(_mm256_set1_ps(x))); }

// In place over whole lanes; at least one score must be finite.
inline void softmax(float* scores, int64_t count) {
  __m256 tops = _mm256_loadu_ps(scores), sums = _mm256_setzero_ps();
  for (int64_t i = kLanes; i < count; i += kLanes) tops = _mm256_max_ps(tops, _mm256_loadu_ps(scores + i));
  float each[kLanes];
  _mm256_storeu_ps(each, tops);
  const __m256 top = _mm256_set1_ps(*std::max_element(each, each + kLanes));
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m256 weights = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(scores + i), top));
    _mm256_storeu_ps(scores + i, weights);
    sums = _mm256_add_ps(sums, weights);
  }
  const __m256 scale = _mm256_set1_ps(1.0f / sum_lanes(sums));
  for (int64_t i = 0; i < count; i += kLanes)
    _mm256_storeu_ps(scores + i, _mm256_mul_ps(_mm256_loadu_ps(scores + i), scale));
}

// out = gate / (1 + e^-gate) * up
inline void silu_times(const float* gate, const float* up, float* out, int64_t width) {
  const __m256 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    const __m256 x = _mm256_loadu_ps(gate + d);
    const __m256 below = _mm256_add_ps(one, exp_lanes(_mm256_sub_ps(zero, x)));
    _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_div_ps(x, below), _mm256_loadu_ps(up + d)));
  }
  for (; d < width; ++d) out[d] = gate[d] / (1.0f + exp_one(-gate[d])) * up[d];
}

}  // namespace paceline
