#pragma once

// One row's softmax, online: its state is the largest logit so far (base 2) at
// [0], the sum of weights at [1] and the weighted values from [kStateHeader].

#include "inference_worker/cpu/elementwise_inl.h"

namespace promptcache::worker::cpu {

template <class S>
struct SoftmaxState {
  using E = Elementwise<S>;
  using F = typename S::F;
  static constexpr uint32_t kLanes = S::kLanes;

  // Turns a row's logits into weights and updates its maximum and sum. Returns
  // what its earlier sums are to be multiplied with.
  static float Update(float* weights, uint32_t limit, float* state) {
    if (limit == kTileTokens) return UpdateWholeTile(weights, state);
    if (limit == 0) return 1.0f;
    const F none = S::Set1(-__builtin_inff());
    F maxima = none;
    uint32_t t = 0;
    for (; t + kLanes <= limit; t += kLanes) {
      maxima = S::Max(maxima, S::Load(weights + t));
    }
    if (t < limit) {
      const F masked = S::KeepFirst(S::Load(weights + t), limit - t, none);
      maxima = S::Max(maxima, masked);
    }
    const float maximum = Larger(S::ReduceMax(maxima), state[0]);
    F sums = S::Zero();
    const F shift = S::Set1(maximum);
    for (t = 0; t < limit; t += kLanes) {
      F weight = E::Exp2(S::Sub(S::Load(weights + t), shift));
      if (limit - t < kLanes) {
        weight = S::KeepFirst(weight, limit - t, S::Zero());
      }
      S::Store(weights + t, weight);
      sums = S::Add(sums, weight);
    }
    return Finish(maximum, S::ReduceAdd(sums), state);
  }

  // The same in the same order, without a branch.
  static float UpdateWholeTile(float* weights, float* state) {
    constexpr int kWide = kTileTokens / kLanes;
    F maxima[4];
    PROMPTCACHE_UNROLL
    for (int v = 0; v < 4; ++v) maxima[v] = S::Load(weights + v * kLanes);
    PROMPTCACHE_UNROLL
    for (int v = 4; v < kWide; ++v) {
      maxima[v % 4] = S::Max(maxima[v % 4], S::Load(weights + v * kLanes));
    }
    const float maximum =
        Larger(S::ReduceMax(S::Max(S::Max(maxima[0], maxima[1]),
                                   S::Max(maxima[2], maxima[3]))),
               state[0]);
    F sums = S::Zero();
    const F shift = S::Set1(maximum);
    PROMPTCACHE_UNROLL
    for (int v = 0; v < kWide; ++v) {
      const F weight = E::Exp2(S::Sub(S::Load(weights + v * kLanes), shift));
      S::Store(weights + v * kLanes, weight);
      sums = S::Add(sums, weight);
    }
    return Finish(maximum, S::ReduceAdd(sums), state);
  }

  static float Larger(float tile_maximum, float maximum) {
    return tile_maximum > maximum ? tile_maximum : maximum;
  }

  static float Finish(float maximum, float sum, float* state) {
    const float factor = RescaleFactor(state[0], maximum);
    state[0] = maximum;
    state[1] = state[1] * factor + sum;
    return factor;
  }

  static float RescaleFactor(float old_maximum, float maximum) {
    if (old_maximum == maximum) return 1.0f;
    if (old_maximum == -__builtin_inff()) return 0.0f;
    return E::Exp2Scalar(old_maximum - maximum);
  }

  // Merges a later segment's state; one that saw nothing changes nothing.
  static void Merge(float* into, const float* from, uint32_t head_dim) {
    const float none = -__builtin_inff();
    if (from[0] == none && from[1] == 0.0f) return;
    if (into[0] == none && into[1] == 0.0f) {
      std::memcpy(into, from, (kStateHeader + head_dim) * sizeof(float));
      return;
    }
    const float maximum = from[0] > into[0] ? from[0] : into[0];
    const float a = RescaleFactor(into[0], maximum);
    const float b = RescaleFactor(from[0], maximum);
    into[0] = maximum;
    into[1] = into[1] * a + from[1] * b;
    const F wide_a = S::Set1(a);
    const F wide_b = S::Set1(b);
    for (uint32_t d = kStateHeader; d < kStateHeader + head_dim; d += kLanes) {
      const F scaled = S::Mul(S::Load(into + d), wide_a);
      S::Store(into + d, S::Fma(S::Load(from + d), wide_b, scaled));
    }
  }
};

}  // namespace promptcache::worker::cpu
