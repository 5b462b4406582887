# Language level, warnings, sanitizers, linker and compiler cache.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")

find_program(PROMPTCACHE_CCACHE ccache)
if(PROMPTCACHE_CCACHE)
  # Without it nothing that uses precompiled headers is cached.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros "${PROMPTCACHE_CCACHE}")
endif()

# Linked PRIVATE by every target of ours, so that nothing of it reaches
# generated code or other projects.
add_library(promptcache_options INTERFACE)
target_compile_options(promptcache_options INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor -Werror
  # designated initialisers leave defaults unsaid on purpose
  -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(promptcache_options INTERFACE
    -Wthread-safety -Werror=thread-safety -Wno-sign-conversion
    # gtest macros of Debian's version
    -Wno-gnu-zero-variadic-macro-arguments)
  add_link_options(-fuse-ld=lld-19)
else()
  find_program(PROMPTCACHE_MOLD mold)
  if(PROMPTCACHE_MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

# Sanitizers reach generated code as well: one ABI for the whole build.
if(PROMPTCACHE_SANITIZE)
  add_compile_options(-fsanitize=${PROMPTCACHE_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${PROMPTCACHE_SANITIZE})
  if(PROMPTCACHE_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()

# Coverage for libFuzzer everywhere; its main only where a program asks for it.
if(PROMPTCACHE_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
