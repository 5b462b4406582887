#include "inference_worker/serving/warm_plan.h"

#include <algorithm>
#include <utility>

namespace promptcache::worker {

std::vector<size_t> WithContext(const pml::Plan& plan, size_t module) {
  std::vector<bool> in(module + 1, false);
  in[module] = true;
  std::vector<size_t> members;
  pml::ContextWalk walk;
  // A context names modules of lower index only.
  for (size_t i = module + 1; i-- > 0;) {
    if (!in[i]) continue;
    members.push_back(i);
    for (const pml::ContextItem& item : walk.New(plan.modules[i].context)) {
      if (item.module >= 0) in[static_cast<size_t>(item.module)] = true;
    }
  }
  std::reverse(members.begin(), members.end());
  return members;
}

pml::Plan ModulesOnly(const pml::Plan& plan,
                      const std::vector<size_t>& members) {
  pml::Plan out;
  out.schema = plan.schema;
  out.layout = plan.layout;
  for (size_t i : members) {
    pml::PlanModule m = plan.modules[i];
    std::vector<pml::ContextItem> context = m.context.Copy();
    for (pml::ContextItem& item : context) {
      if (item.module < 0) continue;
      const auto at = std::lower_bound(members.begin(), members.end(),
                                       static_cast<size_t>(item.module));
      item.module = static_cast<int32_t>(at - members.begin());
    }
    m.context = std::move(context);
    out.modules.push_back(std::move(m));
  }
  return out;
}

}  // namespace promptcache::worker
