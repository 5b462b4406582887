#pragma once

// Templates over a Simd type (isa_*.cc) that has internal linkage, so that
// nothing here is shared between instruction sets. See isa_kernels.h.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "inference_worker/cpu/isa_kernels.h"

// GCC 12 keeps an array of accumulators in registers only when every loop over
// it is unrolled by pragma.
#if defined(__clang__)
#define PROMPTCACHE_UNROLL _Pragma("unroll")
#else
#define PROMPTCACHE_UNROLL _Pragma("GCC unroll 32")
#endif

namespace promptcache::worker::cpu {

template <class S>
struct Elementwise {
  using F = typename S::F;

  // 2^x for x <= 126; below -126 it is 2^-126, NaN stays. Relative error below
  // 3e-7: the fractional part is in [-0.5, 0.5], a polynomial of degree 6.
  static F Exp2(F x) {
    x = S::Max(S::Set1(-126.0f), x);
    const F n = S::Round(x);
    const F f = S::Sub(x, n);
    F p = S::Set1(1.5403530e-4f);
    p = S::Fma(p, f, S::Set1(1.3333558e-3f));
    p = S::Fma(p, f, S::Set1(9.6181291e-3f));
    p = S::Fma(p, f, S::Set1(5.5504109e-2f));
    p = S::Fma(p, f, S::Set1(2.4022651e-1f));
    p = S::Fma(p, f, S::Set1(6.9314718e-1f));
    p = S::Fma(p, f, S::Set1(1.0f));
    return S::ScaleByPowerOf2(p, n);
  }

  static float Exp2Scalar(float x) {
    float lanes[S::kLanes];
    S::Store(lanes, Exp2(S::Set1(x)));
    return lanes[0];
  }

  // e^x for |x| <= 87, clamped beyond; NaN stays. Relative error below 3e-7:
  // the argument is reduced in two steps (Cody and Waite).
  static F Exp(F x) {
    x = S::Max(S::Set1(-87.0f), S::Min(S::Set1(87.0f), x));
    const F n = S::Round(S::Mul(x, S::Set1(1.44269504f)));
    F r = S::Fma(n, S::Set1(-0.693359375f), x);
    r = S::Fma(n, S::Set1(2.12194440e-4f), r);
    F p = S::Set1(1.3888889e-3f);
    p = S::Fma(p, r, S::Set1(8.3333333e-3f));
    p = S::Fma(p, r, S::Set1(4.1666667e-2f));
    p = S::Fma(p, r, S::Set1(1.6666667e-1f));
    p = S::Fma(p, r, S::Set1(0.5f));
    p = S::Fma(p, r, S::Set1(1.0f));
    p = S::Fma(p, r, S::Set1(1.0f));
    return S::ScaleByPowerOf2(p, n);
  }

  // gate / (1 + exp(-gate)).
  static F Silu(F gate) {
    const F e = Exp(S::Sub(S::Zero(), gate));
    return S::Div(gate, S::Add(S::Set1(1.0f), e));
  }

  static void SwiGlu(const float* gate, const float* up, size_t count,
                     float* out) {
    size_t i = 0;
    for (; i + S::kLanes <= count; i += S::kLanes) {
      S::Store(out + i, S::Mul(Silu(S::Load(gate + i)), S::Load(up + i)));
    }
    if (i == count) return;
    float g[S::kLanes] = {};
    float u[S::kLanes] = {};
    std::memcpy(g, gate + i, (count - i) * sizeof(float));
    std::memcpy(u, up + i, (count - i) * sizeof(float));
    S::Store(g, S::Mul(Silu(S::Load(g)), S::Load(u)));
    std::memcpy(out + i, g, (count - i) * sizeof(float));
  }

  // Four running sums, then their lanes, then the tail: one order for a dim.
  static void RmsNorm(const float* x, const float* weight, float epsilon,
                      size_t dim, float* out) {
    constexpr size_t kStep = 4 * S::kLanes;
    F sums[4] = {S::Zero(), S::Zero(), S::Zero(), S::Zero()};
    size_t i = 0;
    for (; i + kStep <= dim; i += kStep) {
      PROMPTCACHE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const F v = S::Load(x + i + j * S::kLanes);
        sums[j] = S::Fma(v, v, sums[j]);
      }
    }
    float total = S::ReduceAdd(
        S::Add(S::Add(sums[0], sums[1]), S::Add(sums[2], sums[3])));
    for (; i < dim; ++i) total += x[i] * x[i];
    const float mean = total / static_cast<float>(dim);
    const float inverse = 1.0f / S::SqrtScalar(mean + epsilon);
    const F inverses = S::Set1(inverse);
    for (i = 0; i + S::kLanes <= dim; i += S::kLanes) {
      const F v = S::Mul(S::Load(x + i), inverses);
      S::Store(out + i, S::Mul(v, S::Load(weight + i)));
    }
    for (; i < dim; ++i) out[i] = x[i] * inverse * weight[i];
  }

  static void Add(const float* y, size_t count, float* x) {
    for (size_t i = 0; i < count; ++i) x[i] += y[i];
  }

  static uint16_t RoundToBf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<uint16_t>(is_nan ? nan : rounded);
  }

  static void ToBf16(const float* x, size_t count, uint16_t* out) {
    for (size_t i = 0; i < count; ++i) out[i] = RoundToBf16(x[i]);
  }

  // x rotated to `position` into `out`, all times `scale`; not in place.
  static void Rotate(const float* x, const RopeView& rope, int32_t position,
                     uint32_t head_dim, float scale, float* out) {
    const uint32_t pairs = rope.table == nullptr ? 0 : rope.num_pairs;
    if (pairs > 0) {
      const bool negative = position < 0;
      const size_t row = static_cast<size_t>(negative ? -position : position);
      const float* const cosines = rope.table + row * 2 * pairs;
      const float* const sines = cosines + pairs;
      const float sign = negative ? -1.0f : 1.0f;
      if (rope.interleaved) {
        RotateInterleaved(x, cosines, sines, sign, scale, pairs, out);
      } else {
        RotatePairs(x, x + pairs, cosines, sines, sign, scale, pairs, out,
                    out + pairs);
      }
    }
    for (uint32_t i = 2 * pairs; i < head_dim; ++i) out[i] = x[i] * scale;
  }

  static void RotatePairs(const float* __restrict__ x,
                          const float* __restrict__ y,
                          const float* __restrict__ cosines,
                          const float* __restrict__ sines, float sign,
                          float scale, uint32_t pairs,
                          float* __restrict__ x_out,
                          float* __restrict__ y_out) {
    for (uint32_t i = 0; i < pairs; ++i) {
      const float s = sines[i] * sign;
      x_out[i] = (x[i] * cosines[i] - y[i] * s) * scale;
      y_out[i] = (y[i] * cosines[i] + x[i] * s) * scale;
    }
  }

  // By way of halves: the compiler then makes vectors of all three loops.
  static void RotateInterleaved(const float* __restrict__ x,
                                const float* cosines, const float* sines,
                                float sign, float scale, uint32_t pairs,
                                float* __restrict__ out) {
    float even[kMaxHeadDim / 2];
    float odd[kMaxHeadDim / 2];
    float even_out[kMaxHeadDim / 2];
    float odd_out[kMaxHeadDim / 2];
    for (uint32_t i = 0; i < pairs; ++i) {
      even[i] = x[2 * i];
      odd[i] = x[2 * i + 1];
    }
    RotatePairs(even, odd, cosines, sines, sign, scale, pairs, even_out,
                odd_out);
    for (uint32_t i = 0; i < pairs; ++i) {
      out[2 * i] = even_out[i];
      out[2 * i + 1] = odd_out[i];
    }
  }

  static void RotateToBf16(const float* x, const RopeView& rope,
                           int32_t position, uint32_t head_dim, uint16_t* out) {
    float rotated[kMaxHeadDim];
    Rotate(x, rope, position, head_dim, 1.0f, rotated);
    ToBf16(rotated, head_dim, out);
  }
};

}  // namespace promptcache::worker::cpu
