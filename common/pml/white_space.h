#pragma once

#include <string>
#include <string_view>

namespace promptcache::pml {

// White space in PML is space, tab and newline; a carriage return (which XML
// gives only by reference) and a no-break space are text.
constexpr bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n'; }
bool IsAllSpace(std::string_view text);

// What a run of text between elements becomes (LANGUAGE.md, "White space"):
// indentation and line breaks that only lay the document out go, the text's
// inner shape stays. `last`: the run is the last thing in a role element or a
// prompt. Not for xml:space="preserve", where a run stays as is.
std::string StripLayout(std::string_view run, bool last);

}  // namespace promptcache::pml
