// Quantised GEMM for any processor, four columns at a time.

#include "common/float_types.h"
#include "inference_worker/cpu/quant_gemm_inl.h"
#include "inference_worker/cpu/quant_kernels.h"
#include "inference_worker/cpu/simd_portable_inl.h"

namespace promptcache::worker::cpu {
namespace {

struct PortableQuant : Portable {
  static constexpr uint32_t kTileRows = 4;
  static constexpr int kQuantSums = 4;
  using Sum = Ints;
  struct Codes {
    Ints at_depth[4];  // of four columns
  };

  static Ints LoadInts(const std::byte* p) {
    Ints x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static F Set1At(const std::byte* p) {
    float x;
    std::memcpy(&x, p, sizeof(x));
    return Set1(x);
  }
  static F LoadHalf(const std::byte* p) {
    F v;
    for (int i = 0; i < 4; ++i) {
      uint16_t half;
      std::memcpy(&half, p + 2 * i, sizeof(half));
      v[i] = HalfToFloat(half);
    }
    return v;
  }

  static Codes Split(Ints codes, int32_t mask) {
    return {{codes & mask, codes >> 8 & mask, codes >> 16 & mask,
             codes >> 24 & mask}};
  }
  static Codes LowNibbles(const std::byte* p) { return Split(LoadInts(p), 15); }
  static Codes HighNibbles(const std::byte* p) {
    return Split(LoadInts(p) >> 4, 15);
  }
  static Codes LoadBytes(const std::byte* p) { return Split(LoadInts(p), 255); }

  template <QuantFormat kFormat>
  static Sum Start(const std::byte* correction) {
    if constexpr (HasMinimum(kFormat)) return Ints{};
    int32_t c;
    std::memcpy(&c, correction, sizeof(c));
    return Ints{c, c, c, c};
  }
  static Sum StepNibbles(Sum sum, const Codes& codes, const std::byte* x) {
    for (int i = 0; i < 4; ++i) {
      sum += codes.at_depth[i] * int32_t{static_cast<int8_t>(x[i])};
    }
    return sum;
  }
  static Sum StepBytes(Sum sum, const Codes& codes, const std::byte* x) {
    return StepNibbles(sum, codes, x);
  }
  template <QuantFormat kFormat>
  static F Finish(Sum sum, const std::byte*) {
    return __builtin_convertvector(sum, F);
  }

  static void Quantize(const float* x, int8_t* codes, float* scale,
                       int32_t* sum) {
    // Magnitudes compare as integers; a NaN is above all of them.
    int32_t bits = 0;
    for (uint32_t i = 0; i < kQuantDepth; ++i) {
      int32_t b;
      std::memcpy(&b, x + i, sizeof(b));
      b &= 0x7fffffff;
      if (b > bits) bits = b;
    }
    if (bits < kTinyBits) return QuantizeZeros(codes, scale, sum);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    *scale = largest / 127.0f;
    const float inverse = 127.0f / largest;
    *sum = 0;
    for (uint32_t i = 0; i < kQuantDepth; ++i) {
      const float y = x[i] * inverse;
      // Not a number: as the vector instructions have it.
      int32_t code = -128;
      if (y >= -128.0f && y <= 128.0f) {
        // Adding 1.5 * 2^23 leaves the nearest integer in the last bits.
        const float magic = 12582912.0f;
        code = static_cast<int32_t>((y + magic) - magic);
      }
      codes[i] = static_cast<int8_t>(code);
      *sum += code;
    }
  }
};

constexpr QuantKernels kKernels =
    MakeQuantKernels<PortableQuant>("portable", 32);

}  // namespace

const QuantKernels* PortableQuantKernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu
