#pragma once

// GCC's vector extension: four lanes, what every 64-bit machine has. Products
// and sums are rounded apart. Included by one file an instruction set; the type
// has internal linkage.

#include <cstdint>
#include <cstring>

#include "inference_worker/cpu/elementwise_inl.h"

namespace promptcache::worker::cpu {
namespace {

struct Portable {
  static constexpr uint32_t kLanes = 4;
  static constexpr uint32_t kTileRows = 4;
  static constexpr bool kPrepareRows = false;
  static constexpr int kSumRegisters = 8;
  static constexpr int kAttentionVectors = 2;
  static constexpr int kAttentionRows = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef uint32_t Pairs __attribute__((vector_size(16)));

  static F Zero() { return F{}; }
  static F Set1(float x) { return F{x, x, x, x}; }
  static F Load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void Store(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
  static F Add(F a, F b) { return a + b; }
  static F Sub(F a, F b) { return a - b; }
  static F Mul(F a, F b) { return a * b; }
  static F Div(F a, F b) { return a / b; }
  static F Fma(F a, F b, F c) { return a * b + c; }
  // Of a NaN and a number: b, as the x86 instructions have it.
  static F Max(F a, F b) { return Select(a > b, a, b); }
  static F Min(F a, F b) { return Select(a < b, a, b); }
  static float SqrtScalar(float x) { return __builtin_sqrtf(x); }

  static F Round(F x) {
    // Adding 1.5 * 2^23 leaves the nearest integer in the last bits.
    const F magic = Set1(12582912.0f);
    return (x + magic) - magic;
  }
  // |n| <= 126.
  static F ScaleByPowerOf2(F p, F n) {
    const auto exponent = __builtin_convertvector(n, Ints);
    const Ints bits = (exponent + 127) << 23;
    F power;
    std::memcpy(&power, &bits, sizeof(power));
    return p * power;
  }
  static float ReduceAdd(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static float ReduceMax(F v) {
    const float a = v[0] > v[2] ? v[0] : v[2];
    const float b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
  }
  static F KeepFirst(F v, uint32_t count, F other) {
    const Ints index = {0, 1, 2, 3};
    return Select(index < static_cast<int32_t>(count), v, other);
  }

  // Of the elements of a and b, one after another: those with even indices to
  // a, the others to b.
  static void Deinterleave(F* a, F* b) {
    const F even = {(*a)[0], (*a)[2], (*b)[0], (*b)[2]};
    const F odd = {(*a)[1], (*a)[3], (*b)[1], (*b)[3]};
    *a = even;
    *b = odd;
  }
  // Undoes it.
  static void Interleave(F* a, F* b) {
    const F first = {(*a)[0], (*b)[0], (*a)[1], (*b)[1]};
    const F second = {(*a)[2], (*b)[2], (*a)[3], (*b)[3]};
    *a = first;
    *b = second;
  }

  static Pairs LoadPairs(const uint16_t* p) {
    Pairs v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static F Low(Pairs v) { return FromBits(v << 16); }
  static F High(Pairs v) { return FromBits(v & 0xffff0000u); }
  static F LoadBf16(const uint16_t* p) {
    const Pairs bits = {p[0], p[1], p[2], p[3]};
    return FromBits(bits << 16);
  }
  static void TransposePairs(const uint16_t* const* rows, uint32_t offset,
                             uint32_t, Pairs* columns) {
    const Pairs a = LoadPairs(rows[0] + offset);
    const Pairs b = LoadPairs(rows[1] + offset);
    const Pairs c = LoadPairs(rows[2] + offset);
    const Pairs d = LoadPairs(rows[3] + offset);
    for (int j = 0; j < 4; ++j) columns[j] = Pairs{a[j], b[j], c[j], d[j]};
  }

 private:
  static F Select(Ints mask, F a, F b) {
    Ints x;
    Ints y;
    std::memcpy(&x, &a, sizeof(x));
    std::memcpy(&y, &b, sizeof(y));
    const Ints z = (x & mask) | (y & ~mask);
    F v;
    std::memcpy(&v, &z, sizeof(v));
    return v;
  }
  static F FromBits(Pairs bits) {
    F v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
  }
};

}  // namespace
}  // namespace promptcache::worker::cpu
