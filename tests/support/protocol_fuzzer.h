// libFuzzer's entry point over everything that decodes bytes from a peer: compiled into the tests, which call it with
// bytes of their own, and by `make fuzz`.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
