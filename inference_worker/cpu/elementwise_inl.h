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

  // P of Gelu, highest power of t - 0.5 first.
  static constexpr float kTail[10] = {
      -0.0129178353f, 0.0302108006f, 0.0138451337f, -0.0611731646f,
      -0.0540041997f, 0.0907407726f, 0.274013562f,  0.363131425f,
      0.32186061f,    0.210806364f};

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

  static F Relu(F x) { return S::Max(S::Zero(), x); }

  // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as x times a sigmoid.
  static F GeluTanh(F x) {
    const F inner = S::Fma(S::Mul(S::Set1(0.044715f), S::Mul(x, x)), x, x);
    const F e = Exp(S::Mul(S::Set1(-1.59576912f), inner));
    return S::Div(x, S::Add(S::Set1(1.0f), e));
  }

  // x Phi(x). The tail Phi(-|x|) is exp(-x^2 / 2) t P(t) with t = 1 / (1 + 0.4
  // |x| / sqrt(2)), P fitted to 5e-8 for |x| <= 22.6: small results are as
  // accurate, relatively, as large ones. The square is taken in two parts, the
  // first exact, since exp would magnify its rounding.
  static F Gelu(F x) {
    const F size = S::Max(S::Sub(S::Zero(), x), x);
    const F y = S::Min(S::Set1(22.6f), size);
    const F large = S::Mul(y, S::Set1(4097.0f));
    const F high = S::Sub(large, S::Sub(large, y));
    const F low = S::Mul(S::Sub(high, y), S::Add(high, y));
    const F half = S::Set1(0.5f);
    const F e = S::Mul(Exp(S::Mul(S::Mul(high, high), S::Set1(-0.5f))),
                       Exp(S::Mul(low, half)));
    const F t =
        S::Div(S::Set1(1.0f), S::Fma(S::Set1(0.282842712f), y, S::Set1(1.0f)));
    const F u = S::Sub(t, half);
    F p = S::Set1(kTail[0]);
    for (int i = 1; i < 10; ++i) p = S::Fma(p, u, S::Set1(kTail[i]));
    const F tail = S::Mul(S::Mul(e, t), p);
    return S::Sub(S::Max(S::Zero(), x), S::Mul(size, tail));
  }

  // The parts of a row that fill a vector, then the rest in one of its own.
  template <F (*kActivation)(F)>
  static void Gated(const float* gate, const float* up, size_t count,
                    float* out) {
    size_t i = 0;
    for (; i + S::kLanes <= count; i += S::kLanes) {
      S::Store(out + i,
               S::Mul(kActivation(S::Load(gate + i)), S::Load(up + i)));
    }
    if (i == count) return;
    float g[S::kLanes] = {};
    float u[S::kLanes] = {};
    std::memcpy(g, gate + i, (count - i) * sizeof(float));
    std::memcpy(u, up + i, (count - i) * sizeof(float));
    S::Store(g, S::Mul(kActivation(S::Load(g)), S::Load(u)));
    std::memcpy(out + i, g, (count - i) * sizeof(float));
  }

  template <F (*kActivation)(F)>
  static void Ungated(const float* x, size_t count, float* out) {
    size_t i = 0;
    for (; i + S::kLanes <= count; i += S::kLanes) {
      S::Store(out + i, kActivation(S::Load(x + i)));
    }
    if (i == count) return;
    float rest[S::kLanes] = {};
    std::memcpy(rest, x + i, (count - i) * sizeof(float));
    S::Store(rest, kActivation(S::Load(rest)));
    std::memcpy(out + i, rest, (count - i) * sizeof(float));
  }

  template <F (*kActivation)(F)>
  static void Apply(const float* x, const float* up, size_t count, float* out) {
    if (up == nullptr) return Ungated<kActivation>(x, count, out);
    Gated<kActivation>(x, up, count, out);
  }

  static void Activate(Activation activation, const float* x, const float* up,
                       size_t count, float* out) {
    switch (activation) {
      case Activation::kSilu:
        return Apply<Silu>(x, up, count, out);
      case Activation::kGelu:
        return Apply<Gelu>(x, up, count, out);
      case Activation::kGeluTanh:
        return Apply<GeluTanh>(x, up, count, out);
      case Activation::kRelu:
        return Apply<Relu>(x, up, count, out);
    }
  }

  // Sum of term(x[i]), in the order of RmsNorm's.
  template <class Term>
  static float Sum(const float* x, size_t dim, Term term) {
    F sums[4] = {S::Zero(), S::Zero(), S::Zero(), S::Zero()};
    size_t i = 0;
    for (; i + 4 * S::kLanes <= dim; i += 4 * S::kLanes) {
      PROMPTCACHE_UNROLL
      for (int j = 0; j < 4; ++j) {
        sums[j] = term(S::Load(x + i + j * S::kLanes), sums[j]);
      }
    }
    float total = S::ReduceAdd(
        S::Add(S::Add(sums[0], sums[1]), S::Add(sums[2], sums[3])));
    float rest[S::kLanes];
    for (; i < dim; ++i) {
      S::Store(rest, term(S::Set1(x[i]), S::Zero()));
      total += rest[0];
    }
    return total;
  }

  // The variance is that of the deviations from the mean: no cancellation.
  static void LayerNorm(const float* x, const float* weight, const float* bias,
                        float epsilon, size_t dim, float* out) {
    const auto count = static_cast<float>(dim);
    const float mean =
        Sum(x, dim, [](F v, F sum) { return S::Add(sum, v); }) / count;
    const F means = S::Set1(mean);
    const float squares = Sum(x, dim, [means](F v, F sum) {
      const F d = S::Sub(v, means);
      return S::Fma(d, d, sum);
    });
    const float inverse = 1.0f / S::SqrtScalar(squares / count + epsilon);
    const F inverses = S::Set1(inverse);
    size_t i = 0;
    for (; i + S::kLanes <= dim; i += S::kLanes) {
      const F v = S::Mul(S::Sub(S::Load(x + i), means), inverses);
      const F b = bias == nullptr ? S::Zero() : S::Load(bias + i);
      S::Store(out + i, S::Fma(v, S::Load(weight + i), b));
    }
    for (; i < dim; ++i) {
      const float b = bias == nullptr ? 0.0f : bias[i];
      out[i] = (x[i] - mean) * inverse * weight[i] + b;
    }
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

  static void Scale(float factor, size_t count, float* x) {
    for (size_t i = 0; i < count; ++i) x[i] *= factor;
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

  // `num_heads` heads, one after another, rotated to `position` into `out`, all
  // times `scale`; not in place.
  static void Rotate(const float* x, const RopeView& rope, int32_t position,
                     uint32_t head_dim, uint32_t num_heads, float scale,
                     float* out) {
    const uint32_t pairs = rope.table == nullptr ? 0 : rope.num_pairs;
    if (pairs > 0) {
      const Turn turn = TurnTo(rope, position, scale);
      if (rope.interleaved) {
        TurnHeads<true>(turn, x, head_dim, num_heads, out);
      } else {
        TurnHeads<false>(turn, x, head_dim, num_heads, out);
      }
    }
    for (uint32_t head = 0; head < num_heads; ++head) {
      for (uint32_t i = 2 * pairs; i < head_dim; ++i) {
        out[head * head_dim + i] = x[head * head_dim + i] * scale;
      }
    }
  }

  // What turns a head to one position, whatever the pairing.
  struct Turn {
    const float* cosines = nullptr;
    const float* sines = nullptr;
    float cosine_scale = 1.0f;
    float sine_scale = 1.0f;
    uint32_t pairs = 0;
  };

  // For a rope that has pairs.
  static Turn TurnTo(const RopeView& rope, int32_t position, float scale) {
    const bool negative = position < 0;
    const size_t row = static_cast<size_t>(negative ? -position : position);
    const float* const cosines = rope.table + row * 2 * rope.num_pairs;
    return {.cosines = cosines,
            .sines = cosines + rope.num_pairs,
            .cosine_scale = scale,
            .sine_scale = negative ? -scale : scale,
            .pairs = rope.num_pairs};
  }

  // Element i pairs with i + pairs, interleaved 2i with 2i + 1. The angle's
  // vectors are loaded once for all heads.
  template <bool kInterleaved>
  static void TurnHeads(const Turn& turn, const float* x, uint32_t head_dim,
                        uint32_t num_heads, float* out) {
    const uint32_t pairs = turn.pairs;
    const size_t step = kInterleaved ? 2 : 1;  // from one pair to the next
    const size_t to_second = kInterleaved ? 1 : pairs;
    const size_t to_second_vector = kInterleaved ? S::kLanes : pairs;
    const size_t all_heads = size_t{num_heads} * head_dim;
    const F cosine_scale = S::Set1(turn.cosine_scale);
    const F sine_scale = S::Set1(turn.sine_scale);
    uint32_t i = 0;
    for (; i + S::kLanes <= pairs; i += S::kLanes) {
      const F c = S::Mul(S::Load(turn.cosines + i), cosine_scale);
      const F s = S::Mul(S::Load(turn.sines + i), sine_scale);
      for (size_t at = step * i; at < step * i + all_heads; at += head_dim) {
        F a = S::Load(x + at);
        F b = S::Load(x + at + to_second_vector);
        if constexpr (kInterleaved) S::Deinterleave(&a, &b);
        F first = S::Sub(S::Mul(a, c), S::Mul(b, s));
        F second = S::Add(S::Mul(b, c), S::Mul(a, s));
        if constexpr (kInterleaved) S::Interleave(&first, &second);
        S::Store(out + at, first);
        S::Store(out + at + to_second_vector, second);
      }
    }
    for (; i < pairs; ++i) {
      const float c = turn.cosines[i] * turn.cosine_scale;
      const float s = turn.sines[i] * turn.sine_scale;
      for (size_t at = step * i; at < step * i + all_heads; at += head_dim) {
        const float a = x[at];
        const float b = x[at + to_second];
        out[at] = a * c - b * s;
        out[at + to_second] = b * c + a * s;
      }
    }
  }

  static void RotateToBf16(const float* x, const RopeView& rope,
                           int32_t position, uint32_t head_dim, uint16_t* out) {
    float rotated[kMaxHeadDim];
    Rotate(x, rope, position, head_dim, 1, 1.0f, rotated);
    ToBf16(rotated, head_dim, out);
  }
};

}  // namespace promptcache::worker::cpu
