#pragma once

#include <google/protobuf/repeated_ptr_field.h>

#include <string>

#include "promptcache/v1/inference.pb.h"

namespace promptcache::cli {

// A plan as a server tells it: one line a span.
std::string PlanText(
    const google::protobuf::RepeatedPtrField<v1::SpanSummary>& spans);

// Why a module was not in the cache: "never_seen", "identity_differs: context".
std::string MissText(v1::MissReason reason, const std::string& differing_field);

}  // namespace promptcache::cli
