#include "cache_daemon/core/mover.h"

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/fault_point.h"
#include "common/progress_word.h"
#include "glog/logging.h"

namespace promptcache::daemon {

Mover::Mover(ModuleCache* cache, WorkSignal* signal, const Options& options)
    : cache_(cache), signal_(signal), options_(options) {}

Mover::~Mover() { Stop(); }

void Mover::Start() {
  if (!threads_.empty()) return;
  stop_.store(false);
  const auto start = [this](bool (Mover::*step)(uint32_t), uint32_t device) {
    threads_.emplace_back([this, step, device] {
      uint64_t seen = 0;
      while (!stop_.load()) {
        if (!(this->*step)(device)) seen = signal_->Wait(seen, options_.tick);
      }
    });
  };
  for (uint32_t i = 0; i < cache_->pool().num_devices(); ++i) {
    start(&Mover::RunMove, i);
    start(&Mover::RunArrival, i);
  }
}

void Mover::Stop() {
  if (threads_.empty()) return;
  stop_.store(true);
  signal_->Notify();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (uint32_t i = 0; i < cache_->pool().num_devices(); ++i) {
    while (const auto ticket = cache_->BeginArrival(i)) {
      cache_->EndArrival(*ticket,
                         absl::CancelledError("the daemon shuts down"));
    }
  }
}

bool Mover::RunOnce() {
  bool moved = false;
  for (uint32_t i = 0; i < cache_->pool().num_devices(); ++i) {
    moved = RunArrival(i) || RunMove(i) || moved;
  }
  return moved;
}

bool Mover::RunArrival(uint32_t device) {
  const std::optional<ArrivalTicket> ticket = cache_->BeginArrival(device);
  if (!ticket.has_value()) return false;
  FaultPoint("arriving");
  const PagePool& pool = cache_->pool();
  const absl::StatusOr<std::vector<uint64_t>> sums = pool.CopyByLayers(
      ticket->source, ticket->destination, ticket->shape,
      [&](uint32_t num_layers) {
        pool.SetProgress(ticket->progress_word,
                         ProgressWord(ticket->generation, num_layers));
      });
  if (!sums.ok()) LOG(ERROR) << "a module did not arrive: " << sums.status();
  cache_->EndArrival(*ticket, sums);
  return true;
}

bool Mover::RunMove(uint32_t device) {
  cache_->ExpireDue();
  const std::optional<MoveTicket> ticket = cache_->BeginMove(device);
  if (!ticket.has_value()) return false;
  const absl::StatusOr<std::vector<uint64_t>> sums = cache_->pool().Copy(
      ticket->source, ticket->destination, ticket->page_bytes);
  if (!sums.ok()) LOG(ERROR) << "a module was not moved: " << sums.status();
  cache_->EndMove(*ticket, sums);
  // After a failure not at once again.
  return sums.ok();
}

}  // namespace promptcache::daemon
