// PC_EMU_GUARD=1: device memory is out of reach of host code.
#include <sys/mman.h>

#include "emulator_engine.h"
#include "fake_cuda.h"

namespace promptcache::gpu::fake {
namespace {

int sections = 0;  // under GlobalMutex()

bool IsDevice(const Allocation& allocation) {
  return allocation.kind != MemoryKind::kHost &&
         allocation.kind != MemoryKind::kRegistered;
}

void Protect() {
  for (const auto& [address, allocation] : AllAllocations()) {
    if (!IsDevice(allocation)) continue;
    mprotect(reinterpret_cast<void*>(address), allocation.mapped_bytes,
             ProtectionNow(allocation));
  }
}

}  // namespace

int ProtectionNow(const Allocation& allocation) {
  const bool closed = emu::GetSettings().guard && sections == 0;
  return closed ? PROT_NONE : allocation.protection;
}

DeviceSection::DeviceSection() {
  if (!emu::GetSettings().guard) return;
  std::lock_guard lock(GlobalMutex());
  if (++sections == 1) Protect();
}

DeviceSection::~DeviceSection() {
  if (!emu::GetSettings().guard) return;
  std::lock_guard lock(GlobalMutex());
  if (--sections == 0) Protect();
}

}  // namespace promptcache::gpu::fake
