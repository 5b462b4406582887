// Quantised GEMM by AMX tiles where there are rows enough, else by AVX-512
// with VNNI: the same bits.

#include "inference_worker/cpu/quant_kernels.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

#include "inference_worker/cpu/quant_avx512vnni_inl.h"

namespace promptcache::worker::cpu {
namespace {

// Rows are prepared as QuantRows has them: whole tiles, then those that are
// left to VNNI.
struct AmxRows : Avx512Vnni {
  static constexpr uint32_t kTileRows = 16;
};
constexpr uint32_t kRows = AmxRows::kTileRows;

constexpr uint32_t kBlockRows = 192;
// Fewer rows than these are faster by VNNI: at all, and as a tile of their own
// beside whole ones.
constexpr uint32_t kMinRows = 2 * kRows;
constexpr uint32_t kMinTileRows = 9;

// Tiles of rows to multiply; the last of them may be filled up. None of two
// scales a block: twice the vector work, no faster than VNNI.
constexpr uint32_t NumTiles(uint32_t num_rows, QuantFormat weights) {
  if (num_rows < kMinRows || ScaleParts(weights) > 1) return 0;
  return num_rows / kRows + (num_rows % kRows >= kMinTileRows ? 1 : 0);
}

void PrepareRows(const float* a, size_t a_stride, uint32_t num_rows,
                 uint32_t depth, QuantFormat weights, void* out) {
  auto* at = static_cast<std::byte*>(out);
  const uint32_t num_blocks = depth / kQuantDepth;
  const uint32_t in_tiles = NumTiles(num_rows, weights) * kRows;
  const size_t block_bytes = kRows * PreparedQuantBytes(weights);
  for (uint32_t first = 0; first < in_tiles; first += kRows) {
    const uint32_t left = num_rows - first;
    const uint32_t rows = left < kRows ? left : kRows;
    for (uint32_t b = 0; b < num_blocks; ++b) {
      // What stands in the rows beyond is multiplied, and not stored.
      if (rows < kRows) std::memset(at, 0, block_bytes);
      for (uint32_t r = 0; r < rows; ++r) {
        const float* x = a + (first + r) * a_stride + size_t{b} * kQuantDepth;
        QuantRows<AmxRows>::PrepareBlock(x, kRows, r, weights, at);
      }
      at += block_bytes;
    }
  }
  if (in_tiles >= num_rows) return;
  QuantRows<Avx512Vnni>::Prepare(a + in_tiles * a_stride, a_stride,
                                 num_rows - in_tiles, depth, weights, at);
}

// A tile of sums is the product of 16 rows and a block of 16 columns, as
// integers. It goes through memory to the vector units, which make of it what
// QuantGemm does, in the same order; a tile's sums stay in registers over the
// depth.
//
// Measured on a Sapphire Rapids: while tiles are in use (and for some 80 cycles
// after), one port of two multiplies and converts vectors of 512 bits, but both
// add them. Hence integers become floats by two additions.
template <QuantFormat kFormat>
class AmxQuantGemm {
 public:
  static void Gemm(const GemmBlock& block) {
    const uint32_t tiles = NumTiles(block.num_rows, kFormat);
    if (tiles > 0) MultiplyTiles(block, tiles);
    const uint32_t in_tiles = tiles * kRows;
    if (in_tiles >= block.num_rows) return;
    GemmBlock rest = block;
    rest.a = static_cast<const std::byte*>(block.a) + tiles * TileBytes(block);
    rest.num_rows = block.num_rows - in_tiles;
    rest.c += in_tiles * block.c_stride;
    if (rest.residual != nullptr) rest.residual += in_tiles * block.c_stride;
    QuantGemm<Avx512Vnni, kFormat>::Gemm(rest);
  }

 private:
  static constexpr size_t kLineBytes = 4 * kQuantCols;
  static constexpr uint32_t kLines = kQuantDepth / 4;
  // Of prepared rows.
  static constexpr size_t kBlockBytes = kRows * PreparedQuantBytes(kFormat);
  // Blocks of a panel that are unpacked at a time: 15 KB.
  static constexpr uint32_t kChunkBlocks = 24;

  // A block of a panel, unpacked: codes less their zero, as signed bytes.
  struct Unpacked {
    alignas(64) std::byte codes[kLines][kLineBytes];
    float scales[kQuantCols];
    float minima[kQuantCols];  // where the format has them
  };
  struct Sums {
    alignas(64) float rows[kRows][kQuantCols];
  };

  static size_t TileBytes(const GemmBlock& block) {
    return block.depth / kQuantDepth * kBlockBytes;
  }

  static void MultiplyTiles(const GemmBlock& block, uint32_t tiles) {
    Configure();
    const uint32_t num_blocks = block.depth / kQuantDepth;
    Unpacked unpacked[kChunkBlocks];
    Sums unfinished[kBlockRows / kRows];
    for (uint32_t col = 0; col < block.num_cols; col += kQuantCols) {
      const auto* const panel = reinterpret_cast<const std::byte*>(
          block.panels + col / kQuantCols * block.panel_elements);
      for (uint32_t b = 0; b < num_blocks; b += kChunkBlocks) {
        const uint32_t left = num_blocks - b;
        const uint32_t count = left < kChunkBlocks ? left : kChunkBlocks;
        Unpack(panel + b * QuantBlockBytes(kFormat), count, unpacked);
        const auto* a =
            static_cast<const std::byte*>(block.a) + b * kBlockBytes;
        for (uint32_t tile = 0; tile < tiles; ++tile) {
          __m512 sums[kRows];
          Load(/*begun=*/b > 0, unfinished[tile], sums);
          AddProducts(a, unpacked, count, sums);
          if (count < left) {
            Store(sums, &unfinished[tile]);
          } else {
            // Beside the next tile's products: all of a panel's lines one after
            // the other fill the queue of stores (a sixth slower, measured).
            StoreColumns(block, tile * kRows, col, sums);
          }
          a += TileBytes(block);
        }
      }
    }
    _tile_release();
  }

  // Tiles 0 and 1 hold sums, 4 and 5 rows, 6 and 7 weights; until release.
  static void Configure() {
    // A constant: GCC 12 does not know that the instruction reads memory.
    alignas(64) static constexpr uint8_t kConfig[64] = {
        // palette 1; bytes of a row, 16 bits each, from 16; rows from 48
        1,  0,  0,  0, 0,  0,  0, 0, 0,  0, 0,  0, 0,  0, 0,  0,
        64, 0,  64, 0, 0,  0,  0, 0, 32, 0, 32, 0, 64, 0, 64, 0,
        0,  0,  0,  0, 0,  0,  0, 0, 0,  0, 0,  0, 0,  0, 0,  0,
        16, 16, 0,  0, 16, 16, 8, 8, 0,  0, 0,  0, 0,  0, 0,  0};
    static_assert(kQuantDepth == 32 && kLines == 8 && kRows == 16);
    _tile_loadconfig(kConfig);
  }

  static void Unpack(const std::byte* packed, uint32_t num_blocks,
                     Unpacked* out) {
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(ZeroCode(kFormat)));
    for (uint32_t b = 0; b < num_blocks; ++b) {
      PROMPTCACHE_UNROLL
      for (uint32_t line = 0; line < kLines; ++line) {
        __m512i codes;
        if constexpr (HasNibbles(kFormat)) {
          const std::byte* const at = packed + line / 2 * kLineBytes;
          codes = line % 2 == 0 ? Avx512Vnni::LowNibbles(at)
                                : Avx512Vnni::HighNibbles(at);
        } else {
          codes = Avx512Vnni::LoadBytes(packed + line * kLineBytes);
        }
        _mm512_store_si512(out->codes[line], _mm512_sub_epi8(codes, zero));
      }
      const std::byte* const scales = packed + CodeBytes(kFormat);
      _mm512_store_ps(out->scales, Avx512Vnni::LoadHalf(scales));
      if constexpr (HasMinimum(kFormat)) {
        _mm512_store_ps(out->minima,
                        Avx512Vnni::LoadHalf(scales + ScaleBytes(kFormat) / 2));
      }
      packed += QuantBlockBytes(kFormat);
      ++out;
    }
    // GCC 12 does not know that the tile instructions read memory.
    asm volatile("" ::: "memory");
  }

  static inline __attribute__((always_inline)) void Load(
      bool begun, const Sums& from, __m512 (&sums)[kRows]) {
    PROMPTCACHE_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      sums[r] = begun ? _mm512_load_ps(from.rows[r]) : _mm512_setzero_ps();
    }
  }
  static inline __attribute__((always_inline)) void Store(
      const __m512 (&sums)[kRows], Sums* to) {
    PROMPTCACHE_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) _mm512_store_ps(to->rows[r], sums[r]);
  }

  // A block's integers are stored while the tiles multiply the next block, and
  // added one block later still: neither waits for the other.
  static inline __attribute__((always_inline)) void AddProducts(
      const std::byte* a, const Unpacked* w, uint32_t num_blocks,
      __m512 (&sums)[kRows]) {
    alignas(64) int32_t even[kRows][kQuantCols];
    alignas(64) int32_t odd[kRows][kQuantCols];
    MultiplyEven(a, w);
    if (num_blocks > 1) MultiplyOdd(a + kBlockBytes, w + 1);
    _tile_stored(0, even, sizeof(even[0]));
    for (uint32_t b = 0; b < num_blocks; b += 2) {
      if (b + 2 < num_blocks) MultiplyEven(a + 2 * kBlockBytes, w + 2);
      if (b + 1 < num_blocks) _tile_stored(1, odd, sizeof(odd[0]));
      AddBlock(even, a, *w, sums);
      if (b + 1 == num_blocks) break;
      if (b + 3 < num_blocks) MultiplyOdd(a + 3 * kBlockBytes, w + 3);
      if (b + 2 < num_blocks) _tile_stored(0, even, sizeof(even[0]));
      AddBlock(odd, a + kBlockBytes, w[1], sums);
      a += 2 * kBlockBytes;
      w += 2;
    }
  }

  static void MultiplyEven(const std::byte* a, const Unpacked* w) {
    _tile_zero(0);
    _tile_loadd(4, a, kQuantDepth);
    _tile_loadd(6, w->codes, kLineBytes);
    _tile_dpbssd(0, 4, 6);
  }
  static void MultiplyOdd(const std::byte* a, const Unpacked* w) {
    _tile_zero(1);
    _tile_loadd(5, a, kQuantDepth);
    _tile_loadd(7, w->codes, kLineBytes);
    _tile_dpbssd(1, 5, 7);
  }

  static inline __attribute__((always_inline)) void AddBlock(
      const int32_t (&dots)[kRows][kQuantCols], const std::byte* a,
      const Unpacked& w, __m512 (&sums)[kRows]) {
    const std::byte* const a_scales = a + kRows * kQuantDepth;
    const std::byte* const corrections = a_scales + kRows * sizeof(float);
    const __m512 scale = _mm512_load_ps(w.scales);
    const __m512 minimum =
        HasMinimum(kFormat) ? _mm512_load_ps(w.minima) : _mm512_setzero_ps();
    PROMPTCACHE_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      if constexpr (HasMinimum(kFormat)) {
        sums[r] = _mm512_fmadd_ps(
            minimum, Avx512Vnni::Set1At(corrections + r * 4), sums[r]);
      }
      sums[r] = _mm512_fmadd_ps(
          ToFloat(_mm512_load_si512(dots[r])),
          _mm512_mul_ps(scale, Avx512Vnni::Set1At(a_scales + r * 4)), sums[r]);
    }
  }

  // Exact below 2^22, as the sum of 32 products of bytes is: an integer added
  // to the bits of 1.5 * 2^23 is added to that number.
  static __m512 ToFloat(__m512i x) {
    static_assert(int64_t{kQuantDepth} * 128 * 128 < int64_t{1} << 22);
    const __m512i bits = _mm512_add_epi32(x, _mm512_set1_epi32(0x4b400000));
    return _mm512_sub_ps(_mm512_castsi512_ps(bits),
                         _mm512_set1_ps(12582912.0f));
  }

  static inline __attribute__((always_inline)) void StoreColumns(
      const GemmBlock& block, uint32_t row, uint32_t col,
      const __m512 (&sums)[kRows]) {
    if (row + kRows <= block.num_rows) {
      __m512 columns[kRows][1];
      PROMPTCACHE_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) columns[r][0] = sums[r];
      QuantGemm<Avx512Vnni, kFormat>::template StoreTile<kRows, 1>(
          block, row, col, columns);
      return;
    }
    Sums memory;
    Store(sums, &memory);
    for (uint32_t r = 0; row + r < block.num_rows; ++r) {
      const __m512 columns = _mm512_load_ps(memory.rows[r]);
      cpu::StoreColumns<Avx512Vnni>(block, row + r, col, &columns, 1);
    }
  }
};

constexpr QuantKernels Make() {
  QuantKernels kernels = {};
  kernels.name = "amx";
  kernels.block_rows = kBlockRows;
  kernels.tile_rows = kRows;
  kernels.prepare_rows = PrepareRows;
  kernels.gemm[static_cast<int>(QuantFormat::kNibbles)] =
      AmxQuantGemm<QuantFormat::kNibbles>::Gemm;
  kernels.gemm[static_cast<int>(QuantFormat::kNibblesMin)] =
      AmxQuantGemm<QuantFormat::kNibblesMin>::Gemm;
  kernels.gemm[static_cast<int>(QuantFormat::kBytes)] =
      AmxQuantGemm<QuantFormat::kBytes>::Gemm;
  kernels.gemm[static_cast<int>(QuantFormat::kByteHalves)] =
      QuantGemm<Avx512Vnni, QuantFormat::kByteHalves>::Gemm;
  return kernels;
}

constexpr QuantKernels kKernels = Make();

}  // namespace

const QuantKernels* AmxQuantKernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu

#else

namespace promptcache::worker::cpu {

const QuantKernels* AmxQuantKernels() { return nullptr; }

}  // namespace promptcache::worker::cpu

#endif
