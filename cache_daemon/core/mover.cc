#include "cache_daemon/core/mover.h"

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "glog/logging.h"

namespace promptcache::daemon {

Mover::Mover(ModuleCache* cache, WorkSignal* signal, const Options& options)
    : cache_(cache), signal_(signal), options_(options) {}

Mover::~Mover() { Stop(); }

void Mover::Start() {
  if (!threads_.empty()) return;
  stop_.store(false);
  for (uint32_t i = 0; i < cache_->pool().num_devices(); ++i) {
    threads_.emplace_back([this, i] { Run(i); });
  }
}

void Mover::Stop() {
  stop_.store(true);
  signal_->Notify();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool Mover::RunOnce() {
  bool moved = false;
  for (uint32_t i = 0; i < cache_->pool().num_devices(); ++i) {
    moved = RunOnce(i) || moved;
  }
  return moved;
}

bool Mover::RunOnce(uint32_t device) {
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

void Mover::Run(uint32_t device) {
  uint64_t seen = 0;
  while (!stop_.load()) {
    if (!RunOnce(device)) seen = signal_->Wait(seen, options_.tick);
  }
}

}  // namespace promptcache::daemon
