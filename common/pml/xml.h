#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/pml/error.h"

namespace promptcache::pml {

struct XmlElement;

// Text (comments are transparent, CDATA and references are text), or an
// element: never two texts next to each other.
struct XmlNode {
  std::string text;
  std::unique_ptr<XmlElement> element;  // null: text
};

struct XmlElement {
  std::string name;
  std::vector<std::pair<std::string, std::string>> attributes;
  Place place;
  std::vector<XmlNode> children;

  // Null when the element has no such attribute.
  const std::string* Attribute(std::string_view attribute) const;
};

// Reads a document: PML_SYNTAX when it is not well-formed UTF-8 XML,
// PML_FORBIDDEN for a DOCTYPE or a processing instruction, whichever comes
// first; PML_LIMIT when elements lie deeper than `max_depth`.
absl::StatusOr<std::unique_ptr<XmlElement>> ParseXml(std::string_view text,
                                                     Source source,
                                                     int64_t max_depth);

// PML_LIMIT unless value <= limit; `what` names the limit.
absl::Status CheckLimit(Source source, std::string_view what, int64_t value,
                        int64_t limit);

// The value of xml:space where it is given, else `inherited`. False: neither
// "preserve" nor "default".
bool ReadSpaceAttribute(const XmlElement& element, bool inherited,
                        bool* preserve);

}  // namespace promptcache::pml
