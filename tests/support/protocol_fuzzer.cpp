#include "support/protocol_fuzzer.h"

#include <string>
#include <string_view>

#include "muster/error.h"
#include "net/frame.h"
#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/shard/quorum.h"

namespace {

using namespace muster;
using namespace muster::server;

// What decodes must encode to the same bytes again.
template <class Message>
void try_as(std::string_view bytes) {
  if (encode(decode<Message>(bytes)) != bytes) __builtin_trap();
}

void try_message(uint16_t type, std::string_view bytes) {
  switch (type % 64) {
    case Hello::kType:
      return try_as<Hello>(bytes);
    case Welcome::kType:
      return try_as<Welcome>(bytes);
    case Refusal::kType:
      return try_as<Refusal>(bytes);
    case Configure::kType: {
      try_as<Configure>(bytes);
      const auto plan = decode<Configure>(bytes).plan;
      plan.validate();
      int64_t numel = 0;
      for (const auto& chunk : cut_chunks(plan)) numel += chunk.numel;
      if (numel < 0) __builtin_trap();
      return;
    }
    case Write::kType:
      return try_as<Write>(bytes);
    case Read::kType:
      return try_as<Read>(bytes);
    case Values::kType:
      return try_as<Values>(bytes);
    case Join::kType:
      return try_as<Join>(bytes);
    case Joined::kType:
      return try_as<Joined>(bytes);
    case Inquire::kType:
      return try_as<Inquire>(bytes);
    case Standing::kType:
      return try_as<Standing>(bytes);
    case Push::kType:
      return try_as<Push>(bytes);
    case Pushed::kType:
      return try_as<Pushed>(bytes);
    case Commit::kType:
      return try_as<Commit>(bytes);
    case Decision::kType:
      return try_as<Decision>(bytes);
    case Sum::kType:
      return try_as<Sum>(bytes);
    case Partials::kType:
      return try_as<Partials>(bytes);
    case Apply::kType:
      return try_as<Apply>(bytes);
    case Applied::kType:
      return try_as<Applied>(bytes);
    case Beat::kType:
      return try_as<Beat>(bytes);
    case Beaten::kType:
      return try_as<Beaten>(bytes);
    case Busy::kType:
      return try_as<Busy>(bytes);
    case Configured::kType:
      return try_as<Configured>(bytes);
    case Resume::kType:
      return try_as<Resume>(bytes);
    case Recalled::kType:
      return try_as<Recalled>(bytes);
    case Deal::kType:
      return try_as<Deal>(bytes);
    case Dealt::kType:
      return try_as<Dealt>(bytes);
    case PushRows::kType:
      return try_as<PushRows>(bytes);
    case PullRows::kType:
      return try_as<PullRows>(bytes);
    case WriteRows::kType:
      return try_as<WriteRows>(bytes);
    case WriteRowSteps::kType:
      return try_as<WriteRowSteps>(bytes);
    case FetchRows::kType:
      return try_as<FetchRows>(bytes);
    case FetchedRows::kType:
      return try_as<FetchedRows>(bytes);
    case WritePart::kType:
      return try_as<WritePart>(bytes);
    case WritesPart::kType:
      return try_as<WritesPart>(bytes);
    case Start::kType:
      return try_as<Start>(bytes);
    case Passes::kType:
      return try_as<Passes>(bytes);
    default:
      return try_as<Quorum::Record>(bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (size >= net::FrameHeader::kBytes) {
      const auto* first = reinterpret_cast<const std::byte*>(data);
      const auto again = net::encode(net::decode_header(first));
      if (!std::equal(again.begin(), again.end(), first)) __builtin_trap();
    }
  } catch (const Error&) {
    // Refused, as it should be.
  }
  try {
    if (size > 0) try_message(data[0], bytes.substr(1));
  } catch (const Error&) {
    return 0;
  }
  return 0;
}
