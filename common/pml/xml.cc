#include "common/pml/xml.h"

#include <expat.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"

namespace promptcache::pml {
namespace {

bool IsNameChar(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '#' ||
         c == '.' || c == '_' || c == '-' || c == ':';
}

// Of the '&' or '<' that made the character at `at` one too many, its distance
// before it; -1 when it was something else.
int StrayBefore(std::string_view text, size_t at) {
  if (at < text.size() && text[at] == '<') return 0;  // in an attribute
  size_t begin = std::min(at, text.size());
  if (begin > 0 && text[begin - 1] == '<') return 1;
  while (begin > 0 && IsNameChar(text[begin - 1])) --begin;
  if (begin == 0 || text[begin - 1] != '&') return -1;
  return static_cast<int>(at - begin + 1);
}

// Whether it matters which element is open.
bool IsAboutTheEnd(XML_Error code) {
  return code == XML_ERROR_NO_ELEMENTS || code == XML_ERROR_UNCLOSED_TOKEN ||
         code == XML_ERROR_UNCLOSED_CDATA_SECTION ||
         code == XML_ERROR_PARTIAL_CHAR || code == XML_ERROR_TAG_MISMATCH;
}

// Deeper elements are counted, not kept: reading, judging and destroying a
// document recurse.
class Reader {
 public:
  Reader(Source source, int64_t max_depth)
      : parser_(XML_ParserCreate("UTF-8"), &XML_ParserFree),
        source_(source),
        max_depth_(max_depth) {
    XML_SetUserData(parser_.get(), this);
    XML_SetElementHandler(parser_.get(), &OnStart, &OnEnd);
    XML_SetCharacterDataHandler(parser_.get(), &OnText);
    XML_SetStartDoctypeDeclHandler(parser_.get(), &OnDoctype);
    XML_SetProcessingInstructionHandler(parser_.get(), &OnInstruction);
    XML_SetXmlDeclHandler(parser_.get(), &OnDeclaration);
  }

  absl::StatusOr<std::unique_ptr<XmlElement>> Read(std::string_view text) {
    if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
    const XML_Status status = XML_Parse(
        parser_.get(), text.data(), static_cast<int>(text.size()), XML_TRUE);
    PC_RETURN_IF_ERROR(refused_);
    if (status != XML_STATUS_OK) return Malformed(text);
    PC_RETURN_IF_ERROR(CheckLimit(source_, "depth", deepest_, max_depth_));
    return std::move(root_);
  }

 private:
  static Reader& Self(void* data) { return *static_cast<Reader*>(data); }

  absl::Status Refusal(std::string reason, std::string detail) const {
    const auto line = XML_GetCurrentLineNumber(parser_.get());
    return PmlError{.reason = std::move(reason),
                    .source = source_,
                    .place = {.line = static_cast<int32_t>(line)},
                    .detail = std::move(detail)}
        .ToStatus();
  }

  // What expat found, where, and what is to be done about it.
  absl::Status Malformed(std::string_view text) const {
    const XML_Parser parser = parser_.get();
    const XML_Error code = XML_GetErrorCode(parser);
    const auto index = static_cast<size_t>(
        std::max<int64_t>(0, XML_GetCurrentByteIndex(parser)));
    Place place = {
        .line = static_cast<int32_t>(XML_GetCurrentLineNumber(parser)),
        .column = static_cast<int32_t>(XML_GetCurrentColumnNumber(parser)) + 1};
    std::string detail = XML_ErrorString(code);
    if (code == XML_ERROR_INVALID_TOKEN) {
      if (const int back = StrayBefore(text, index); back >= 0) {
        place.column -= back;
        const bool opens = text[index - static_cast<size_t>(back)] == '<';
        absl::StrAppend(&detail, opens
                                     ? ": a < that is text is written &lt;"
                                     : ": an & that is text is written &amp;");
      }
    } else if (code == XML_ERROR_UNDEFINED_ENTITY) {
      absl::StrAppend(&detail, ": an & that is text is written &amp;");
    } else if (code == XML_ERROR_NO_ELEMENTS) {
      detail = root_ == nullptr ? "the document has no element"
                                : "the document ends too early";
    }
    if (IsAboutTheEnd(code) && !open_.empty()) {
      absl::StrAppend(&detail, ": <", open_.back()->name, "> of line ",
                      open_.back()->place.line, ", column ",
                      open_.back()->place.column, " is open");
    }
    return PmlError{.reason = "PML_SYNTAX",
                    .source = source_,
                    .place = place,
                    .detail = std::move(detail)}
        .ToStatus();
  }

  void Refuse(std::string reason, std::string detail) {
    if (!refused_.ok()) return;
    refused_ = Refusal(std::move(reason), std::move(detail));
    XML_StopParser(parser_.get(), XML_FALSE);
  }

  static void OnStart(void* data, const XML_Char* name,
                      const XML_Char** attributes) {
    Reader& self = Self(data);
    const int64_t depth = self.depth_++;
    self.deepest_ = std::max(self.deepest_, depth);
    if (depth > self.max_depth_) return;
    auto element = std::make_unique<XmlElement>();
    element->name = name;
    for (; *attributes != nullptr; attributes += 2) {
      element->attributes.emplace_back(attributes[0], attributes[1]);
    }
    XML_Parser parser = self.parser_.get();
    element->place = {
        .line = static_cast<int32_t>(XML_GetCurrentLineNumber(parser)),
        .column = static_cast<int32_t>(XML_GetCurrentColumnNumber(parser)) + 1};
    XmlElement* added = element.get();
    if (self.open_.empty()) {
      self.root_ = std::move(element);
    } else {
      self.open_.back()->children.push_back({.element = std::move(element)});
    }
    self.open_.push_back(added);
  }

  static void OnEnd(void* data, const XML_Char* /*name*/) {
    Reader& self = Self(data);
    if (--self.depth_ <= self.max_depth_) self.open_.pop_back();
  }

  static void OnText(void* data, const XML_Char* text, int num_bytes) {
    Reader& self = Self(data);
    if (self.depth_ > self.max_depth_ + 1) return;
    std::vector<XmlNode>& children = self.open_.back()->children;
    if (children.empty() || children.back().element != nullptr) {
      children.emplace_back();
    }
    children.back().text.append(text, static_cast<size_t>(num_bytes));
  }

  static void OnDoctype(void* data, const XML_Char* name, const XML_Char*,
                        const XML_Char*, int) {
    Self(data).Refuse("PML_FORBIDDEN", absl::StrCat("a DOCTYPE: ", name));
  }

  static void OnInstruction(void* data, const XML_Char* target,
                            const XML_Char*) {
    Self(data).Refuse("PML_FORBIDDEN",
                      absl::StrCat("a processing instruction: ", target));
  }

  static void OnDeclaration(void* data, const XML_Char* /*version*/,
                            const XML_Char* encoding, int) {
    if (encoding == nullptr) return;
    std::string upper(encoding);
    for (char& c : upper) {
      c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    if (upper == "UTF-8" || upper == "UTF8" || upper == "US-ASCII") return;
    Self(data).Refuse("PML_SYNTAX",
                      absl::StrCat("encoding ", encoding, " is not UTF-8"));
  }

  const std::unique_ptr<std::remove_pointer_t<XML_Parser>,
                        decltype(&XML_ParserFree)>
      parser_;
  const Source source_;
  const int64_t max_depth_;
  int64_t depth_ = 0;  // of the element that begins next; the root has 0
  int64_t deepest_ = 0;
  std::unique_ptr<XmlElement> root_;
  std::vector<XmlElement*> open_;
  absl::Status refused_;
};

}  // namespace

const std::string* XmlElement::Attribute(std::string_view attribute) const {
  for (const auto& [key, value] : attributes) {
    if (key == attribute) return &value;
  }
  return nullptr;
}

absl::StatusOr<std::unique_ptr<XmlElement>> ParseXml(std::string_view text,
                                                     Source source,
                                                     int64_t max_depth) {
  // Expat counts bytes in an int.
  PC_RETURN_IF_ERROR(CheckLimit(source, "document bytes",
                                static_cast<int64_t>(text.size()),
                                std::numeric_limits<int>::max()));
  return Reader(source, max_depth).Read(text);
}

absl::Status CheckLimit(Source source, std::string_view what, int64_t value,
                        int64_t limit) {
  if (value <= limit) return absl::OkStatus();
  return PmlError{.reason = "PML_LIMIT",
                  .source = source,
                  .detail = absl::StrCat(ToAbsl(what), ": ", value,
                                         " is over the limit of ", limit),
                  .numbers = {{std::string(what), value}, {"limit", limit}}}
      .ToStatus();
}

bool ReadSpaceAttribute(const XmlElement& element, bool inherited,
                        bool* preserve) {
  *preserve = inherited;
  const std::string* value = element.Attribute("xml:space");
  if (value == nullptr) return true;
  *preserve = *value == "preserve";
  return *preserve || *value == "default";
}

}  // namespace promptcache::pml
