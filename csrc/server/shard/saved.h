// What a server's snapshot says besides the tensors of its chunks and tables.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "server/protocol/protocol.h"
#include "server/shard/dealer.h"
#include "server/shard/image.h"
#include "server/shard/quorum.h"

namespace muster::server {

/// A value.
struct Saved {
  Configure configured;
  std::string token;    ///< of the job
  uint64_t origin = 0;  ///< see Configured
  bool is_told = true;  ///< of the job: false where it began after another one, and nobody said yet where it goes on
  Quorum::Record quorum;
  std::vector<Image::Facts> images;  ///< by chunk of the server, then by table and stripe
  Dealer::Record batches;

  template <class M, class W>
  static void visit(M& m, W& w) {
    visit_value(m.configured, w);
    w.text(m.token, kMaxToken);
    w.number(m.origin);
    w.number(m.is_told);
    Quorum::Record::visit(m.quorum, w);
    w.list(m.images, kMaxNumbers + kMaxTables * RowStripes::kMost,
           [](W& wire, auto& image) { Image::Facts::visit(image, wire); });
    Dealer::Record::visit(m.batches, w);
  }
};

/// One tensor, which comes first in a snapshot.
checkpoint::NamedTensors tensor_of(const Saved& saved);
/// Throws CheckpointError where it is not there, CommError for what no server wrote.
Saved saved_in(const checkpoint::NamedTensors& tensors);

}  // namespace muster::server
