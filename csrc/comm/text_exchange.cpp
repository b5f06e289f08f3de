#include "comm/text_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace muster {

std::vector<std::string> exchange_texts(comm::Communicator& communicator, const std::string& text) {
  const auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<uint8_t>());
  auto work = communicator.all_gather(bytes);
  work.wait();
  std::vector<std::string> texts;
  for (const auto& output : work.outputs()) {
    if (!output.defined()) {
      texts.emplace_back();
      continue;
    }
    const auto* first = output.const_data_ptr<uint8_t>();
    texts.emplace_back(first, first + output.numel());
  }
  return texts;
}

}  // namespace muster
