#include "cache_daemon/core/page_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/available_memory.h"
#include "common/byte_size.h"
#include "common/page_sum.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

constexpr uint64_t kSystemPageBytes = 4096;

uint64_t SaturatingSum(uint64_t a, uint64_t b) {
  return b > UINT64_MAX - a ? UINT64_MAX : a + b;
}

// Calls fn(segment, page) for every page of the runs, in order.
template <typename Fn>
void ForEachPage(const PageRuns& runs, Fn fn) {
  for (const PageRun& run : runs) {
    for (uint32_t i = 0; i < run.num_pages; ++i) {
      fn(run.segment, run.first_page + i);
    }
  }
}

// Of the GPU's memory allocations; the driver is asked again when it matters.
constexpr uint64_t kGpuGranularityBytes = uint64_t{2} << 20;
// What is copied at once where a GPU's pages are summed.
constexpr uint64_t kStagingBytes = uint64_t{8} << 20;

void AppendSums(const std::byte* pages, uint32_t num_pages, uint64_t page_bytes,
                std::vector<uint64_t>* sums) {
  for (uint32_t i = 0; i < num_pages; ++i) {
    sums->push_back(PageSum({pages + i * page_bytes, page_bytes}));
  }
}

// Calls fn(from, to) for the longest runs that have one partner each.
template <typename Fn>
absl::Status ForEachPair(const PageRuns& from, const PageRuns& to, Fn fn) {
  size_t t = 0;
  uint32_t done_of_t = 0;
  for (PageRun source : from) {
    while (source.num_pages > 0) {
      PageRun target = to[t];
      target.first_page += done_of_t;
      target.num_pages =
          std::min(source.num_pages, target.num_pages - done_of_t);
      PageRun part = source;
      part.num_pages = target.num_pages;
      PC_RETURN_IF_ERROR(fn(part, target));
      source.first_page += part.num_pages;
      source.num_pages -= part.num_pages;
      done_of_t += part.num_pages;
      if (done_of_t == to[t].num_pages) {
        ++t;
        done_of_t = 0;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PagePool::Options::Validate() const {
  if (device_bytes < kSystemPageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device_bytes: ", device_bytes,
                     " is too small, the least is ", kSystemPageBytes));
  }
  if (segment_bytes == 0 || segment_bytes % kSystemPageBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "segment_bytes ", segment_bytes, " is no multiple of 4096"));
  }
  if (min_page_bytes == 0 || min_page_bytes > segment_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_page_bytes ", min_page_bytes,
                     " is not between 1 and segment_bytes"));
  }
  for (const gpu::Device* device : devices) {
    if (device->is_cuda() != devices.front()->is_cuda()) {
      return absl::InvalidArgumentError(
          "device tiers are all on GPUs or all on the CPU");
    }
  }
  if (devices.empty() || !devices.front()->is_cuda()) return absl::OkStatus();
  if (device_bytes < kGpuGranularityBytes ||
      segment_bytes % kGpuGranularityBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "on a GPU segment_bytes is a multiple of ", kGpuGranularityBytes,
        " and device_bytes at least that, not ", segment_bytes, " and ",
        device_bytes));
  }
  for (const gpu::Device* device : devices) {
    for (const gpu::HandleKind kind : handles) {
      if (kind == gpu::HandleKind::kMemfd || !device->CanImport(kind)) {
        return absl::InvalidArgumentError(absl::StrCat(
            device->info().uuid, " cannot export memory by handles of kind ",
            ToAbsl(gpu::HandleKindName(kind))));
      }
    }
  }
  return absl::OkStatus();
}

uint64_t PagePool::Options::cpu_bytes() const {
  if (!devices.empty() && devices.front()->is_cuda()) return host_bytes;
  uint64_t bytes = host_bytes;
  for (size_t i = 0; i < std::max<size_t>(devices.size(), 1); ++i) {
    bytes = SaturatingSum(bytes, device_bytes);
  }
  return bytes;
}

absl::Status PagePool::AddTier(const char* name, uint64_t tier_bytes,
                               const Options& options, PlaceOfSegment place) {
  gpu::Device* const device = devices_[place.device];
  const bool on_gpu = device->is_cuda() && place.tier == Tier::kDevice;
  const uint64_t granularity = on_gpu ? kGpuGranularityBytes : kSystemPageBytes;
  std::vector<gpu::HandleKind> kinds = {gpu::HandleKind::kMemfd};
  if (on_gpu) kinds = options.handles;
  if (kinds.empty()) {
    kinds.push_back(device->info().vmm_fds ? gpu::HandleKind::kCudaFd
                                           : gpu::HandleKind::kCudaIpc);
  }
  uint64_t left = tier_bytes - tier_bytes % granularity;
  for (size_t i = 0; left > 0; ++i) {
    const uint64_t bytes = std::min(left, options.segment_bytes);
    absl::StatusOr<std::unique_ptr<gpu::SharedSegment>> segment =
        device->NewSegment(name, bytes, kinds[i % kinds.size()]);
    if (!segment.ok()) {
      return absl::Status(segment.status().code(),
                          absl::StrCat(on_gpu ? device->info().uuid + ": " : "",
                                       segment.status().message()));
    }
    if (device->is_cuda() && (*segment)->on_host()) {
      // For every GPU: pinning is portable.
      PC_ASSIGN_OR_RETURN(gpu::Pinning pinning,
                          device->Pin((*segment)->base(), bytes,
                                      /*read_only=*/false));
      pinnings_.push_back(std::move(pinning));
    }
    segments_.push_back(*std::move(segment));
    places_.push_back(place);
    left -= bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(
    const Options& options) {
  PC_RETURN_IF_ERROR(options.Validate());
  PC_RETURN_IF_ERROR(
      CheckMemory(options.host_bytes == 0 ? "--device_bytes"
                                          : "--device_bytes and --host_bytes",
                  options.cpu_bytes(),
                  options.available_bytes.value_or(SaturatingSum(
                      AvailableMemoryBytes(), FreeHugePageBytes()))));
  LOG(INFO) << "page pool: taking " << RoundedByteSize(options.cpu_bytes())
            << " of the CPU's memory";
  std::unique_ptr<PagePool> pool(new PagePool());
  pool->devices_ = options.devices;
  if (options.devices.empty()) {
    pool->cpu_ = gpu::NewHostDevice();
    pool->devices_.push_back(pool->cpu_.get());
  }
  for (uint32_t i = 0; i < pool->num_devices(); ++i) {
    PC_RETURN_IF_ERROR(pool->AddTier("promptcache-device", options.device_bytes,
                                     options, {Tier::kDevice, i}));
  }
  PC_RETURN_IF_ERROR(pool->AddTier("promptcache-host", options.host_bytes,
                                   options, {Tier::kHost, 0}));
  for (gpu::Device* device : pool->devices_) {
    Lanes& lanes = *pool->lanes_.emplace_back(std::make_unique<Lanes>());
    for (Lane* lane : {&lanes.zero, &lanes.copy, &lanes.arrival}) {
      MutexLock lock(&lane->mu);
      PC_ASSIGN_OR_RETURN(lane->stream, device->NewStream());
    }
  }
  pool->generations_stride_ =
      static_cast<uint32_t>(options.segment_bytes / options.min_page_bytes);
  PC_ASSIGN_OR_RETURN(pool->generations_,
                      gpu::HostSegment::Create(
                          "promptcache-generations",
                          sizeof(uint64_t) * (pool->progress_words_begin() +
                                              kNumProgressWords)));
  if (absl::Status s = pool->generations_.SealFutureWrites(); !s.ok()) {
    // Linux before 5.1: workers could write it, which only harms themselves.
    LOG(WARNING) << s;
  }
  for (uint32_t i = 0; i < pool->num_devices(); ++i) {
    LOG(INFO) << "page pool: device " << pool->device_info(i).uuid << " "
              << pool->tier_bytes(Tier::kDevice, i) << " bytes ("
              << pool->kind(Tier::kDevice, i) << ")";
  }
  LOG(INFO) << "page pool: host " << pool->tier_bytes(Tier::kHost) << " bytes, "
            << pool->num_segments() << " segments in all";
  return pool;
}

uint64_t PagePool::tier_bytes(Tier tier, uint32_t device) const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < num_segments(); ++i) {
    if (In(i, tier, device)) bytes += segment_bytes(i);
  }
  return bytes;
}

std::vector<gpu::HandleKind> PagePool::handle_kinds(Tier tier,
                                                    uint32_t device) const {
  std::vector<gpu::HandleKind> kinds;
  for (uint32_t i = 0; i < num_segments(); ++i) {
    const gpu::HandleKind kind = segments_[i]->kind();
    if (In(i, tier, device) && std::ranges::find(kinds, kind) == kinds.end()) {
      kinds.push_back(kind);
    }
  }
  return kinds;
}

bool PagePool::mapped_read_only(Tier tier, uint32_t device) const {
  for (uint32_t i = 0; i < num_segments(); ++i) {
    if (In(i, tier, device) && !segments_[i]->importable_read_only()) {
      return false;
    }
  }
  return true;
}

std::string PagePool::kind(Tier tier, uint32_t device) const {
  for (uint32_t i = 0; i < num_segments(); ++i) {
    if (!In(i, tier, device)) continue;
    if (!segments_[i]->on_host()) return "cuda";
    return absl::StrCat("cpu ", segments_[i]->description(),
                        on_gpu() ? ", pinned" : "");
  }
  return "none";
}

uint32_t PagePool::PagesIn(uint32_t segment, uint64_t page_bytes) const {
  return static_cast<uint32_t>(std::min<uint64_t>(
      segment_bytes(segment) / page_bytes, generations_stride_));
}

uint64_t* PagePool::GenerationWord(uint32_t segment, uint32_t page) const {
  return reinterpret_cast<uint64_t*>(generations_.base()) +
         uint64_t{segment} * generations_stride_ + page;
}

void PagePool::Stamp(const PageRuns& runs, uint64_t generation) const {
  ForEachPage(runs, [&](uint32_t segment, uint32_t page) {
    std::atomic_ref<uint64_t>(*GenerationWord(segment, page))
        .store(generation, std::memory_order_release);
  });
}

uint64_t PagePool::Generation(uint32_t segment, uint32_t page) const {
  return std::atomic_ref<uint64_t>(*GenerationWord(segment, page))
      .load(std::memory_order_acquire);
}

void PagePool::SetProgress(uint32_t word, uint64_t value) const {
  auto* words = reinterpret_cast<uint64_t*>(generations_.base());
  std::atomic_ref<uint64_t>(words[progress_words_begin() + word])
      .store(value, std::memory_order_release);
}

uint64_t PagePool::Progress(uint32_t word) const {
  auto* words = reinterpret_cast<uint64_t*>(generations_.base());
  return std::atomic_ref<uint64_t>(words[progress_words_begin() + word])
      .load(std::memory_order_acquire);
}

absl::Status PagePool::Zero(const PageRuns& runs, uint64_t page_bytes) const {
  if (runs.empty()) return absl::OkStatus();
  Lane& lane = lanes_[device(runs.front().segment)]->zero;
  MutexLock lock(&lane.mu);
  for (const PageRun& run : runs) {
    PC_RETURN_IF_ERROR(lane.stream->Zero(Address(run, page_bytes),
                                         run.num_pages * page_bytes));
  }
  return lane.stream->Synchronize();
}

absl::Status PagePool::SumsFromDevice(const PageRun& run, uint64_t page_bytes,
                                      std::vector<uint64_t>* sums) const {
  const auto at_once = static_cast<uint32_t>(std::min<uint64_t>(
      run.num_pages, std::max<uint64_t>(kStagingBytes / page_bytes, 1)));
  const uint32_t device = this->device(run.segment);
  Lane& lane = lanes_[device]->copy;
  PC_ASSIGN_OR_RETURN(const gpu::PinnedBuffer staging,
                      devices_[device]->AllocatePinned(at_once * page_bytes));
  for (uint32_t done = 0; done < run.num_pages; done += at_once) {
    const uint32_t pages = std::min(at_once, run.num_pages - done);
    MutexLock lock(&lane.mu);
    PC_RETURN_IF_ERROR(lane.stream->Copy(
        staging.data(), Address(run, page_bytes) + done * page_bytes,
        pages * page_bytes, gpu::CopyKind::kToHost));
    PC_RETURN_IF_ERROR(lane.stream->Synchronize());
    AppendSums(staging.data(), pages, page_bytes, sums);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> PagePool::Sums(
    const PageRuns& runs, uint64_t page_bytes) const {
  std::vector<uint64_t> sums;
  for (const PageRun& run : runs) {
    if (segments_[run.segment]->on_host()) {
      AppendSums(Address(run, page_bytes), run.num_pages, page_bytes, &sums);
    } else {
      PC_RETURN_IF_ERROR(SumsFromDevice(run, page_bytes, &sums));
    }
  }
  return sums;
}

absl::StatusOr<std::vector<uint64_t>> PagePool::Copy(
    const PageRuns& from, const PageRuns& to, uint64_t page_bytes) const {
  if (from.empty()) return std::vector<uint64_t>();
  const bool to_host = segments_[to.front().segment]->on_host();
  // Between tiers, one of which is on the host (on the CPU, both).
  const gpu::CopyKind kind =
      to_host ? gpu::CopyKind::kToHost : gpu::CopyKind::kToDevice;
  // The host's side says 0.
  const uint32_t device = std::max(this->device(from.front().segment),
                                   this->device(to.front().segment));
  Lane& lane = lanes_[device]->copy;
  MutexLock lock(&lane.mu);
  PC_RETURN_IF_ERROR(
      ForEachPair(from, to, [&](const PageRun& source, const PageRun& target) {
        lane.mu.AssertHeld();
        return lane.stream->Copy(Address(target, page_bytes),
                                 Address(source, page_bytes),
                                 source.num_pages * page_bytes, kind);
      }));
  std::vector<uint64_t> sums;
  // Summed while the copy runs: the originals are on the host.
  if (!to_host) {
    for (const PageRun& run : from) {
      AppendSums(Address(run, page_bytes), run.num_pages, page_bytes, &sums);
    }
  }
  PC_RETURN_IF_ERROR(lane.stream->Synchronize());
  if (to_host) {
    for (const PageRun& run : to) {
      AppendSums(Address(run, page_bytes), run.num_pages, page_bytes, &sums);
    }
  }
  return sums;
}

absl::StatusOr<std::vector<uint64_t>> PagePool::CopyByLayers(
    const PageRuns& from, const PageRuns& to, const PageShape& shape,
    absl::FunctionRef<void(uint32_t)> arrived) const {
  std::vector<gpu::PageStretch> stretches;
  PC_RETURN_IF_ERROR(
      ForEachPair(from, to, [&](const PageRun& source, const PageRun& target) {
        stretches.push_back({.to = Address(target, shape.page_bytes),
                             .from = Address(source, shape.page_bytes),
                             .num_pages = source.num_pages});
        return absl::OkStatus();
      }));
  const uint32_t device = this->device(to.front().segment);
  Lane& lane = lanes_[device]->arrival;
  MutexLock lock(&lane.mu);
  gpu::Stream& stream = *lane.stream;
  absl::StatusOr<std::vector<uint64_t>> sums =
      QueueAndSum(*devices_[device], stream, stretches, shape, arrived);
  // Nothing may be on its way to pages that go to others.
  if (!sums.ok()) stream.Synchronize().IgnoreError();  // the first is told
  return sums;
}

// The originals are summed while the copy runs.
absl::StatusOr<std::vector<uint64_t>> PagePool::QueueAndSum(
    gpu::Device& device, gpu::Stream& stream,
    std::span<const gpu::PageStretch> stretches, const PageShape& shape,
    absl::FunctionRef<void(uint32_t)> arrived) const {
  PC_ASSIGN_OR_RETURN(
      const std::vector<gpu::LayerGroup> groups,
      gpu::QueueLayeredCopy(device, stream, stretches, shape.page_bytes,
                            shape.num_layers));
  auto next = groups.begin();
  std::vector<uint64_t> sums;
  for (const gpu::PageStretch& stretch : stretches) {
    for (size_t page = 0; page < stretch.num_pages; ++page) {
      AppendSums(stretch.from + page * shape.page_bytes, 1, shape.page_bytes,
                 &sums);
      while (next != groups.end()) {
        PC_ASSIGN_OR_RETURN(const bool done, next->done->Done());
        if (!done) break;
        arrived(next++->end_layer);
      }
    }
  }
  for (; next != groups.end(); ++next) {
    PC_RETURN_IF_ERROR(next->done->Synchronize());
    arrived(next->end_layer);
  }
  return sums;
}

}  // namespace promptcache::daemon
