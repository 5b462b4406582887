// Warp-wide instructions: votes, ldmatrix, mma; and the free functions that
// device_emulator.h promises.
#include "emulator_engine.h"

namespace promptcache::gpu::emu {
namespace {

float Widen(Operand type, uint32_t bits) {
  if (type == Operand::kBf16) {
    const uint32_t wide = bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  __half_raw raw;
  raw.x = static_cast<uint16_t>(bits);
  return __half2float(__half(raw));
}

struct Mma {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// a[i] and b[i] hold columns t, t + 1 (low half first) of the fragments of the
// PTX manual, t = 2 (lane % 4).
template <Operand kType>
void RunMma(void** arguments, unsigned mask) {
  if (mask != ~0u) Die("mma needs all 32 lanes");
  ++Engine::OfThisThread().counters.matrix_products;
  alignas(64) float a[16][16];
  alignas(64) float b[16][8];
  alignas(64) float d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<Mma*>(arguments[lane]);
    const int g = lane >> 2;
    const int t = 2 * (lane & 3);
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        a[g + 8 * (i & 1)][t + 8 * (i >> 1) + half] =
            Widen(kType, (m.a[i] >> (16 * half)) & 0xffffu);
      }
      for (int i = 0; i < 2; ++i) {
        b[t + 8 * i + half][g] =
            Widen(kType, (m.b[i] >> (16 * half)) & 0xffffu);
        d[g + 8 * i][t + half] = m.d[2 * i + half];
      }
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<Mma*>(arguments[lane]);
    const int g = lane >> 2;
    const int t = 2 * (lane & 3);
    for (int i = 0; i < 4; ++i) m.d[i] = d[g + 8 * (i >> 1)][t + (i & 1)];
  }
}

struct Load {
  uint32_t* out;
  const char* row;
};

template <bool kTransposed>
void RunLoad(void** arguments, unsigned mask) {
  if (mask != ~0u) Die("ldmatrix needs all 32 lanes");
  Counters& counters = Engine::OfThisThread().counters;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const char* rows[8];
    unsigned banks = 0;  // of 16 bytes
    for (int i = 0; i < 8; ++i) {
      rows[i] = static_cast<Load*>(arguments[8 * matrix + i])->row;
      const auto address = reinterpret_cast<uintptr_t>(rows[i]);
      if (address % 16 != 0) Die("misaligned row of ldmatrix");
      banks |= 1u << (address / 16 % 8);
    }
    ++counters.matrix_loads;
    counters.bank_conflicts +=
        static_cast<uint64_t>(8 - __builtin_popcount(banks));
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane >> 2;
      const int t = 2 * (lane & 3);
      uint16_t pair[2];
      if (kTransposed) {
        std::memcpy(&pair[0], rows[t] + 2 * g, 2);
        std::memcpy(&pair[1], rows[t + 1] + 2 * g, 2);
      } else {
        std::memcpy(pair, rows[g] + 2 * t, 4);
      }
      std::memcpy(&static_cast<Load*>(arguments[lane])->out[matrix], pair, 4);
    }
  }
}

}  // namespace

void WarpCollective(unsigned mask, void* argument, WarpFunction fn) {
  Engine::OfThisThread().WarpCollective(mask, argument, fn);
}
void BlockBarrier() { Engine::OfThisThread().BlockBarrier(); }
int BlockReduce(Reduction reduction, bool predicate) {
  return Engine::OfThisThread().BlockReduce(reduction, predicate);
}
void* DynamicShared() { return Engine::OfThisThread().shared(); }
void CpAsync(void* to, const void* from, size_t bytes, size_t source_bytes) {
  Engine::OfThisThread().CpAsync(to, from, bytes, source_bytes);
}
void CpAsyncCommit() { Engine::OfThisThread().CpAsyncCommit(); }
void CpAsyncWait(int pending_groups) {
  Engine::OfThisThread().CpAsyncWait(pending_groups);
}

unsigned Ballot(unsigned mask, bool predicate) {
  struct Argument {
    bool predicate;
    unsigned out;
  } argument = {predicate, 0};
  WarpCollective(mask, &argument, [](void** arguments, unsigned lanes) {
    unsigned votes = 0;
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (static_cast<Argument*>(arguments[lane])->predicate) {
        votes |= 1u << lane;
      }
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      static_cast<Argument*>(arguments[__builtin_ctz(left)])->out = votes;
    }
  });
  return argument.out;
}

void Mma16816(Operand type, float* d, const uint32_t* a, uint32_t b0,
              uint32_t b1) {
  Mma argument = {d, a, {b0, b1}};
  WarpCollective(
      ~0u, &argument,
      type == Operand::kBf16 ? RunMma<Operand::kBf16> : RunMma<Operand::kFp16>);
}

void LoadMatrix(uint32_t* out, const void* row, bool transposed) {
  NoteRead(row, 16);
  Load argument = {out, static_cast<const char*>(row)};
  WarpCollective(~0u, &argument, transposed ? RunLoad<true> : RunLoad<false>);
}

}  // namespace promptcache::gpu::emu
