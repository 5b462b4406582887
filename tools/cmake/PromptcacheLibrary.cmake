# promptcache_library(NAME HDRS ... SRCS ... DEPS ... PRIVATE_DEPS ...)
# One static library a folder. Headers form a PUBLIC file set rooted at the
# repository, so that `#include "common/status_macros.h"` works and
# CMAKE_VERIFY_INTERFACE_HEADER_SETS compiles each header alone.
function(promptcache_library name)
  cmake_parse_arguments(ARG "" "" "HDRS;SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(promptcache_${name} STATIC ${ARG_SRCS})
    set(scope PUBLIC)
    target_link_libraries(promptcache_${name}
      PRIVATE promptcache_options ${ARG_PRIVATE_DEPS})
  else()
    add_library(promptcache_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(promptcache::${name} ALIAS promptcache_${name})
  target_sources(promptcache_${name} ${scope}
    FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}" FILES ${ARG_HDRS})
  target_link_libraries(promptcache_${name} ${scope} ${ARG_DEPS})
endfunction()

# promptcache_binary(NAME SRCS ... DEPS ...): a program in build/bin.
function(promptcache_binary name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE promptcache_options ${ARG_DEPS})
endfunction()

# promptcache_emulate_cuda(TARGET): the program or test gets the stand-in for the
# CUDA runtime in place of the static one (tests/cuda_on_cpu).
function(promptcache_emulate_cuda target)
  set_target_properties(${target} PROPERTIES PROMPTCACHE_EMULATED_CUDA ON)
endfunction()

# Compiling tests is half of a build, a third of that is optimising them. What
# they test is optimised all the same.
add_library(promptcache_test_options INTERFACE)
target_compile_options(promptcache_test_options INTERFACE
  $<IF:$<BOOL:${PROMPTCACHE_SANITIZE}>,-O1,-O0> -pthread
  # As ccache wants it where headers are precompiled.
  "$<IF:$<CXX_COMPILER_ID:GNU>,-fpch-preprocess,SHELL:-Xclang -fno-pch-timestamp>")
target_link_libraries(promptcache_test_options
  INTERFACE promptcache_options GTest::gmock)

# promptcache_test(NAME SRCS ... DEPS ... LABELS ...): one gtest binary a layer.
# PREFIX: before the names of tests that several binaries have.
function(promptcache_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;PREFIX" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(PROMPTCACHE_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 5")
  endif()
  promptcache_binary(${name} SRCS ${ARG_SRCS}
    DEPS ${ARG_DEPS} promptcache::test_support promptcache_test_options
         GTest::gtest_main)
  target_precompile_headers(${name} REUSE_FROM promptcache_test_headers)
  # Only what has the label runs under the thread sanitizer: the rest is built
  # there by name alone.
  if(PROMPTCACHE_SANITIZE STREQUAL "thread" AND NOT "tsan" IN_LIST ARG_LABELS)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST
    TEST_PREFIX "${ARG_PREFIX}"
    PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  # gtest_discover_tests keeps only the first of several labels.
  set(labels_file "${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake")
  file(WRITE "${labels_file}"
    "set_tests_properties(\${${name}_TESTS} PROPERTIES LABELS \"${ARG_LABELS}\")\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${labels_file}")
endfunction()
