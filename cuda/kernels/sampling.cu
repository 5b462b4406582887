// A block a row. Nothing is sorted: top-k and top-p select a threshold among
// 64-bit keys (value, then id) by a histogram of eight bits at a time, and the
// draw is a scan of what lies at or above the thresholds, in order of ids.
//
// Numerics: weights are expf((logit - best) / temperature) and are counted in
// units of 2^-40, as integers: their sums do not depend on who adds first, so
// that a seed's choice is the same every time. A draw differs from the CPU
// sampler's only within those roundings of a border.

#include "cuda/kernels/device.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/sampling.h"

namespace promptcache::gpu {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarpLanes;
constexpr int kBins = 256;
constexpr int kBinsPerLane = kBins / kWarpLanes;
constexpr float kWeightUnits = 1099511627776.0f;  // 2^40

using Mass = unsigned long long;

// What a row's threads agree on.
struct RowState {
  float best = 0;
  float temperature = 0;
  float min_weight = 0;
  Mass logit_threshold = 0;   // of LogitKey
  Mass weight_threshold = 0;  // of WeightKey
};

__device__ __forceinline__ uint32_t FloatBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

__device__ __forceinline__ float NeverChosen() {
  return -static_cast<float>(INFINITY);
}

__device__ __forceinline__ float Usable(float logit) {
  // NaN differs from itself; -0 becomes 0.
  return logit != logit ? NeverChosen() : logit + 0.0f;
}

// Greater: better; of equal values the lower id.
__device__ __forceinline__ Mass KeyOf(uint32_t ordered, int id) {
  return static_cast<Mass>(ordered) << 32 | (0xffffffffu - unsigned(id));
}

__device__ __forceinline__ Mass LogitKey(float logit, int id) {
  const uint32_t bits = FloatBits(logit);
  return KeyOf(bits >> 31 != 0 ? ~bits : bits | 0x80000000u, id);
}

__device__ __forceinline__ float WeightOf(const RowState& row, float logit) {
  return expf((logit - row.best) / row.temperature);
}

__device__ __forceinline__ Mass UnitsOf(float weight) {
  return static_cast<Mass>(weight * kWeightUnits);
}

// What the filters leave of a token's weight.
__device__ __forceinline__ float Kept(const RowState& row, float logit,
                                      int id) {
  if (LogitKey(logit, id) < row.logit_threshold) return 0.0f;
  const float weight = WeightOf(row, logit);
  if (KeyOf(FloatBits(weight), id) < row.weight_threshold) return 0.0f;
  return weight < row.min_weight ? 0.0f : weight;
}

__device__ __forceinline__ Mass WarpMass(Mass value) {
  for (int step = kWarpLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

struct Scratch {
  Mass bins[kBins];
  Mass warp_mass[kMaxWarps];
  Mass prefix;     // the threshold's digits so far
  Mass need;       // mass still wanted at this prefix
  bool all_taken;  // everything with this prefix is wanted
  Mass best[kMaxWarps];
};

// The best logit's key.
__device__ __forceinline__ Mass BestKey(const float* logits, int vocab,
                                        Scratch& s) {
  Mass best = 0;
  for (int id = static_cast<int>(threadIdx.x); id < vocab;
       id += static_cast<int>(blockDim.x)) {
    const Mass key = LogitKey(logits[id], id);
    if (key > best) best = key;
  }
  for (int step = kWarpLanes / 2; step > 0; step /= 2) {
    const Mass other = __shfl_xor_sync(kAllLanes, best, step);
    if (other > best) best = other;
  }
  if (threadIdx.x % kWarpLanes == 0) s.best[threadIdx.x / kWarpLanes] = best;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / kWarpLanes; ++warp) {
    if (s.best[warp] > best) best = s.best[warp];
  }
  return best;
}

// By the first warp: the bin, from the top, in which the mass wanted is
// reached.
__device__ __forceinline__ void ChooseBin(Scratch& s, int shift) {
  const int lane = static_cast<int>(threadIdx.x);
  // Lane 0 has the highest bins.
  const int top = kBins - 1 - lane * kBinsPerLane;
  Mass own = 0;
  for (int i = 0; i < kBinsPerLane; ++i) own += s.bins[top - i];
  Mass through = own;
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const Mass before = __shfl_up_sync(kAllLanes, through, step);
    if (lane >= step) through += before;
  }
  const Mass need = s.need;
  __syncwarp();
  Mass above = through - own;
  if (above >= need || through < need) return;
  for (int i = 0; i < kBinsPerLane; ++i) {
    const Mass mass = s.bins[top - i];
    if (above + mass >= need) {
      s.prefix |= static_cast<Mass>(top - i) << shift;
      s.need = need - above;
      s.all_taken = s.need == mass;
      return;
    }
    above += mass;
  }
}

// The greatest threshold such that the masses of all keys at or above it reach
// `need`. REQUIRES: 0 < need <= the mass of all; all threads call it.
// key_and_mass(id, &key) gives the mass.
template <typename KeyAndMass>
__device__ __forceinline__ Mass SelectThreshold(int vocab, Mass need,
                                                Scratch& s,
                                                KeyAndMass key_and_mass) {
  if (threadIdx.x == 0) {
    s.prefix = 0;
    s.need = need;
    s.all_taken = false;
  }
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins;
         bin += static_cast<int>(blockDim.x)) {
      s.bins[bin] = 0;
    }
    __syncthreads();
    const Mass prefix = s.prefix;
    for (int id = static_cast<int>(threadIdx.x); id < vocab;
         id += static_cast<int>(blockDim.x)) {
      Mass key;
      const Mass mass = key_and_mass(id, &key);
      // Shifted in two steps: by 64 nothing would be defined.
      if ((key ^ prefix) >> shift >> 8 != 0 || mass == 0) continue;
      atomicAdd(&s.bins[key >> shift & (kBins - 1)], mass);
    }
    __syncthreads();
    if (threadIdx.x < kWarpLanes) ChooseBin(s, shift);
    __syncthreads();
    if (s.all_taken) break;
  }
  const Mass threshold = s.prefix;
  __syncthreads();
  return threshold;
}

// Sum of the kept weights of ids [begin, end), by one warp.
__device__ __forceinline__ Mass WarpKept(const RowState& row,
                                         const float* logits, int begin,
                                         int end) {
  Mass mass = 0;
  for (int id = begin + static_cast<int>(threadIdx.x % kWarpLanes); id < end;
       id += kWarpLanes) {
    mass += UnitsOf(Kept(row, logits[id], id));
  }
  return WarpMass(mass);
}

__device__ __forceinline__ Mass BlockMass(const Scratch& s, unsigned warps) {
  Mass total = 0;
  for (unsigned warp = 0; warp < warps; ++warp) total += s.warp_mass[warp];
  return total;
}

// The id at which the running sum of kept weights first exceeds
// uniform * total. Each warp has a stretch of ids.
__device__ __forceinline__ void Draw(const RowState& row, const float* logits,
                                     int vocab, double uniform, Scratch& s,
                                     int32_t* chosen) {
  const unsigned warps = blockDim.x / kWarpLanes;
  const unsigned warp = threadIdx.x / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
  const int stretch =
      (vocab + static_cast<int>(warps) - 1) / static_cast<int>(warps);
  const int begin = static_cast<int>(warp) * stretch;
  const int end = begin + stretch < vocab ? begin + stretch : vocab;
  const Mass own = WarpKept(row, logits, begin, end);
  if (lane == 0) s.warp_mass[warp] = own;
  __syncthreads();
  const Mass total = BlockMass(s, warps);
  Mass wanted = static_cast<Mass>(uniform * static_cast<double>(total));
  if (wanted >= total) wanted = total - 1;
  Mass before = BlockMass(s, warp);
  if (wanted < before || wanted >= before + own) return;
  for (int first = begin; first < end; first += kWarpLanes) {
    const int id = first + lane;
    Mass through = id < end ? UnitsOf(Kept(row, logits[id], id)) : 0;
    for (int step = 1; step < kWarpLanes; step *= 2) {
      const Mass other = __shfl_up_sync(kAllLanes, through, step);
      if (lane >= step) through += other;
    }
    const unsigned beyond = __ballot_sync(kAllLanes, before + through > wanted);
    if (beyond != 0) {
      if (lane == __ffs(static_cast<int>(beyond)) - 1) *chosen = id;
      return;
    }
    before += __shfl_sync(kAllLanes, through, kWarpLanes - 1);
  }
}

// NaN to what is never chosen, and the penalty on repeated ids.
__device__ __forceinline__ void PrepareLogits(const SamplingParams& p,
                                              const SamplingRow& options,
                                              float* logits) {
  const int step = static_cast<int>(blockDim.x);
  for (int id = static_cast<int>(threadIdx.x); id < p.vocab; id += step) {
    logits[id] = Usable(logits[id]);
  }
  __syncthreads();
  if (options.repetition_penalty == 1.0f) return;
  for (int i = static_cast<int>(threadIdx.x); i < options.num_penalized;
       i += step) {
    const int id = p.penalized[options.first_penalized + i];
    if (id < 0 || id >= p.vocab) continue;
    const float logit = logits[id];
    logits[id] = logit > 0.0f ? logit / options.repetition_penalty
                              : logit * options.repetition_penalty;
  }
  __syncthreads();
}

// The mass that top-p wants, of what top-k left.
__device__ __forceinline__ Mass TopPMass(const RowState& row,
                                         const float* logits, int vocab,
                                         float top_p, Scratch& s) {
  Mass mass = 0;
  for (int id = static_cast<int>(threadIdx.x); id < vocab;
       id += static_cast<int>(blockDim.x)) {
    mass += UnitsOf(Kept(row, logits[id], id));
  }
  mass = WarpMass(mass);
  if (threadIdx.x % kWarpLanes == 0) {
    s.warp_mass[threadIdx.x / kWarpLanes] = mass;
  }
  __syncthreads();
  const Mass total = BlockMass(s, blockDim.x / kWarpLanes);
  __syncthreads();
  const double enough = static_cast<double>(total) * double{top_p};
  const Mass need = static_cast<Mass>(enough);
  const Mass whole =
      need < total && static_cast<double>(need) < enough ? need + 1 : need;
  return whole == 0 ? 1 : whole;
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    SamplingKernel(SamplingParams p) {
  __shared__ Scratch scratch;
  const SamplingRow options = p.rows[blockIdx.x];
  float* logits = p.logits + static_cast<int64_t>(blockIdx.x) * p.vocab;
  int32_t* chosen = p.chosen + blockIdx.x;
  PrepareLogits(p, options, logits);
  const Mass best = BestKey(logits, p.vocab, scratch);
  const int best_id =
      static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
  RowState row;
  row.best = logits[best_id];
  // With an infinite best there is nothing left to weigh.
  if (options.temperature == 0.0f || fabsf(row.best) == -NeverChosen()) {
    if (threadIdx.x == 0) *chosen = best_id;
    return;
  }
  row.temperature = options.temperature;
  __syncthreads();
  if (options.top_k > 0 && options.top_k < static_cast<uint32_t>(p.vocab)) {
    row.logit_threshold = SelectThreshold(p.vocab, options.top_k, scratch,
                                          [&](int id, Mass* key) -> Mass {
                                            *key = LogitKey(logits[id], id);
                                            return 1;
                                          });
  }
  if (options.top_p < 1.0f) {
    const Mass need = TopPMass(row, logits, p.vocab, options.top_p, scratch);
    row.weight_threshold =
        SelectThreshold(p.vocab, need, scratch, [&](int id, Mass* key) -> Mass {
          const float weight = Kept(row, logits[id], id);
          *key = KeyOf(FloatBits(weight), id);
          return UnitsOf(weight);
        });
  }
  row.min_weight = options.min_p;
  Draw(row, logits, p.vocab, options.uniform, scratch, chosen);
}

}  // namespace

cudaError_t LaunchSampling(const SamplingParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  int warps = (params.vocab + 8 * kWarpLanes - 1) / (8 * kWarpLanes);
  if (warps > kMaxWarps) warps = kMaxWarps;
  return Launch(SamplingKernel, dim3(static_cast<unsigned>(params.num_rows)),
                dim3(static_cast<unsigned>(warps * kWarpLanes)), 0, stream,
                params);
}

}  // namespace promptcache::gpu
