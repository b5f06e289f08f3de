// libFuzzer's entry point over everything that decodes bytes from a peer: compiled into the tests, which call it with
// bytes of their own; with clang, build it alone:
//   clang++ -std=c++20 -fsanitize=fuzzer,address -Icsrc -Icsrc/include -I<build>/include <torch's flags>
//     tests/support/protocol_fuzzer.cpp -lmuster
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
