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
  if (thread_.joinable()) return;
  stop_.store(false);
  thread_ = std::thread([this] { Run(); });
}

void Mover::Stop() {
  if (!thread_.joinable()) return;
  stop_.store(true);
  signal_->Notify();
  thread_.join();
}

bool Mover::RunOnce() {
  cache_->ExpireDue();
  const std::optional<MoveTicket> ticket = cache_->BeginMove();
  if (!ticket.has_value()) return false;
  const absl::StatusOr<std::vector<uint64_t>> sums = cache_->pool().Copy(
      ticket->source, ticket->destination, ticket->page_bytes);
  if (!sums.ok()) LOG(ERROR) << "a module was not moved: " << sums.status();
  cache_->EndMove(*ticket, sums);
  // After a failure not at once again.
  return sums.ok();
}

void Mover::Run() {
  while (!stop_.load()) {
    if (!RunOnce()) signal_->Wait(options_.tick);
  }
}

}  // namespace promptcache::daemon
