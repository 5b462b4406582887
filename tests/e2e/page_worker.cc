// A worker without a model, for tests of the memory path: writes modules of one
// byte value into reservations on its GPU and reads them back, over the same
// client as the worker. Says on standard output what it does. Exit status: 0
// as it should be, 3 wrong bytes, 1 anything else.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/fault_point.h"
#include "common/status_macros.h"
#include "cuda/runtime/gpus.h"
#include "glog/logging.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/engine/private_pages.h"

ABSL_FLAG(std::string, daemon_socket, "", "the daemon's socket");
ABSL_FLAG(std::string, device, "cuda", "cuda or cpu");
ABSL_FLAG(int, first, 0, "number of the first module");
ABSL_FLAG(int, count, 1, "how many modules");
ABSL_FLAG(int, pages, 4, "pages of each");
ABSL_FLAG(bool, arriving, false, "read modules while they arrive");
ABSL_FLAG(bool, hold, false, "keep the last lease until killed");

namespace promptcache::worker {
namespace {

constexpr KvLayout kLayout{.num_layers = 4, .num_kv_heads = 1, .head_dim = 16};
constexpr absl::Duration kPatience = absl::Seconds(30);

void Say(const std::string& words) {
  std::printf("%s\n", words.c_str());
  std::fflush(stdout);
}

uint8_t ByteOf(int module) { return static_cast<uint8_t>(module % 251 + 1); }

class PageWorker {
 public:
  absl::Status Attach();
  // Reads the module, or writes it where it is missing.
  absl::Status Do(int module);
  bool wrong() const { return wrong_; }

 private:
  absl::Status Write(int module);
  absl::Status Read(int module);
  absl::StatusOr<bool> ReadLayers(int module, uint32_t first, uint32_t count,
                                  const std::vector<const std::byte*>& pages);
  absl::StatusOr<bool> ReadArriving(int module);

  std::unique_ptr<gpu::Device> device_;
  std::unique_ptr<gpu::Stream> stream_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<PrivatePages> pages_;
  std::unique_ptr<CacheClient> client_;
  std::unique_ptr<CacheLease> lease_;
  bool wrong_ = false;
};

absl::Status PageWorker::Attach() {
  const bool cpu = absl::GetFlag(FLAGS_device) == "cpu";
  if (cpu) {
    device_ = gpu::NewHostDevice();
  } else {
    PC_ASSIGN_OR_RETURN(device_, gpu::OpenGpu(gpu::FindGpus(), ""));
  }
  PC_ASSIGN_OR_RETURN(stream_, device_->NewStream());
  gpu::Device* const gpu = cpu ? nullptr : device_.get();
  PC_ASSIGN_OR_RETURN(memory_, KvMemory::Create({.device = gpu}));
  PC_ASSIGN_OR_RETURN(pages_,
                      PrivatePages::Create(kLayout, 8 << 20, memory_.get()));
  PC_ASSIGN_OR_RETURN(
      client_,
      CacheClient::Create({.socket_path = absl::GetFlag(FLAGS_daemon_socket),
                           .worker_id = absl::StrCat("page-worker-", getpid()),
                           .model = "pages",
                           .layout = kLayout,
                           .device = gpu,
                           .acquire_timeout = kPatience,
                           .reads_arriving = absl::GetFlag(FLAGS_arriving)}));
  PC_RETURN_IF_ERROR(client_->WaitAttached(absl::Now() + kPatience));
  Say("attached");
  return absl::OkStatus();
}

absl::Status PageWorker::Do(int module) {
  const auto num_pages = static_cast<uint32_t>(absl::GetFlag(FLAGS_pages));
  CacheClient::AcquireArgs args{.want_page_sums = true, .schema = "s"};
  args.keys.push_back({.key = Sha256Of(absl::StrCat("module ", module)),
                       .num_tokens = num_pages * kLayout.page_tokens,
                       .path = absl::StrCat("m", module)});
  PC_ASSIGN_OR_RETURN(lease_, client_->Acquire(args));
  switch (lease_->modules()[0].outcome) {
    case AcquireOutcome::kReserved:
      return Write(module);
    case AcquireOutcome::kHit:
      return Read(module);
    default:
      Say(absl::StrCat("missing ", module));
      return absl::OkStatus();
  }
}

absl::Status PageWorker::Write(int module) {
  const AcquiredModule& reserved = lease_->modules()[0];
  const size_t page_bytes = kLayout.page_bytes();
  const std::vector<uint8_t> bytes(page_bytes, ByteOf(module));
  for (size_t i = 0; i < reserved.write_pages.size(); ++i) {
    if (i == reserved.write_pages.size() / 2) FaultPoint("half_written");
    PC_RETURN_IF_ERROR(stream_->Copy(reserved.write_pages[i], bytes.data(),
                                     page_bytes, gpu::CopyKind::kToDevice));
    PC_RETURN_IF_ERROR(stream_->Synchronize());
  }
  FaultPoint("written");
  CommitModule commit{.reservation_id = reserved.reservation_id,
                      .num_tokens = static_cast<uint32_t>(
                          reserved.write_pages.size() * kLayout.page_tokens)};
  PC_ASSIGN_OR_RETURN(
      commit.page_sums,
      memory_->Sums(reserved.read_pages, page_bytes, reserved.on_host));
  FaultPoint("summed");
  PC_ASSIGN_OR_RETURN(const std::vector<bool> committed,
                      lease_->Commit({commit}, absl::Now() + kPatience));
  Say(absl::StrCat(committed[0] ? "wrote " : "lost ", module));
  return absl::OkStatus();
}

// Layers [first, first + count) of the pages are as they were written.
absl::StatusOr<bool> PageWorker::ReadLayers(
    int module, uint32_t first, uint32_t count,
    const std::vector<const std::byte*>& pages) {
  const size_t layer_bytes = kLayout.page_bytes() / kLayout.num_layers;
  const std::vector<uint8_t> due(count * layer_bytes, ByteOf(module));
  std::vector<uint8_t> bytes(due.size());
  bool right = true;
  for (const std::byte* page : pages) {
    PC_RETURN_IF_ERROR(stream_->Copy(bytes.data(), page + first * layer_bytes,
                                     bytes.size(), gpu::CopyKind::kToHost));
    PC_RETURN_IF_ERROR(stream_->Synchronize());
    right = right && bytes == due;
  }
  return right;
}

// Each layer as soon as it can be read.
absl::StatusOr<bool> PageWorker::ReadArriving(int module) {
  bool right = true;
  for (uint32_t layer = 0; layer < kLayout.num_layers;) {
    const ModuleProgress progress = lease_->Progress(0);
    const uint32_t end = std::min(progress.num_layers, kLayout.num_layers);
    if (layer == end) continue;
    PC_ASSIGN_OR_RETURN(const bool same,
                        ReadLayers(module, layer, end - layer,
                                   lease_->modules()[0].read_pages));
    right = right && same;
    layer = end;
  }
  while (!lease_->Progress(0).ended) {
  }
  return right;
}

absl::Status PageWorker::Read(int module) {
  const AcquiredModule& hit = lease_->modules()[0];
  std::vector<const std::byte*> pages = hit.read_pages;
  bool right = true;
  std::vector<std::byte*> copies;
  FaultPoint("reading");
  if (hit.arriving) {
    PC_ASSIGN_OR_RETURN(right, ReadArriving(module));
  } else {
    PC_ASSIGN_OR_RETURN(
        const std::vector<uint64_t> sums,
        memory_->Sums(pages, kLayout.page_bytes(), hit.on_host));
    std::unique_ptr<Arrival> copy;
    if (hit.on_host && memory_->on_gpu()) {
      PC_ASSIGN_OR_RETURN(copies, pages_->Allocate(pages.size()));
      PC_ASSIGN_OR_RETURN(copy,
                          memory_->StartCopyFromHost(pages, copies, kLayout));
      pages.assign(copies.begin(), copies.end());
    }
    right = sums == hit.page_sums && (copy == nullptr || copy->AwaitVerified());
    PC_ASSIGN_OR_RETURN(const bool same,
                        ReadLayers(module, 0, kLayout.num_layers, pages));
    right = right && same;
  }
  pages_->Free(copies);
  // As in the worker: what was read counts if the lease still holds.
  if (!lease_->Valid(0)) {
    Say(absl::StrCat("invalid ", module));
    return absl::OkStatus();
  }
  wrong_ = wrong_ || !right;
  Say(absl::StrCat(right ? "read " : "WRONG ", module,
                   hit.arriving                       ? " as it arrived"
                   : hit.on_host && memory_->on_gpu() ? " through a copy"
                                                      : " in place"));
  return absl::OkStatus();
}

absl::StatusOr<bool> Run() {
  PageWorker worker;
  PC_RETURN_IF_ERROR(worker.Attach());
  const int first = absl::GetFlag(FLAGS_first);
  for (int i = 0; i < absl::GetFlag(FLAGS_count); ++i) {
    PC_RETURN_IF_ERROR(worker.Do(first + i));
  }
  if (absl::GetFlag(FLAGS_hold)) {
    Say("holding");
    while (true) ::pause();
  }
  return worker.wrong();
}

}  // namespace
}  // namespace promptcache::worker

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  const absl::StatusOr<bool> wrong = promptcache::worker::Run();
  if (!wrong.ok()) {
    std::fprintf(stderr, "%s\n", wrong.status().ToString().c_str());
    return 1;
  }
  return *wrong ? 3 : 0;
}
