#include "common/fault_point.h"

namespace promptcache {

void FaultPoint(const char*) {}

}  // namespace promptcache
