// A checkpoint that servers write with the chief, each its part: csrc/checkpoint/draft.h has the files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/protocol/messages/bounds.h"
#include "server/protocol/plan.h"
#include "server/protocol/wire.h"

namespace muster::server {

inline constexpr size_t kMaxPath = 4096;
inline constexpr const char* kChiefsPart = "chief";  ///< how the chief is called as a writer of a draft

/// The chief's: the server writes its part of what stands after `step`, while steps go on, or where steps are not made
/// together of what it has when it comes to each chunk and stripe. Asked again of the draft whose part it writes, or
/// has written, a server answers as before; a part of another draft is given up. The answer is WritesPart. Who asks
/// holds the lock (checkpoint::PartLock) of writer `chief` for as long as it waits for parts.
struct WritePart {
  static constexpr uint16_t kType = 40;
  uint64_t step = 0;
  uint64_t id = 0;                    ///< of no other draft: one that failed may have had its path
  std::string draft;                  ///< its folder, absolute
  std::vector<uint32_t> left = {};    ///< parameters that the chief writes itself, ascending
  std::vector<uint32_t> begun = {};   ///< those whose state counts though no step was made, ascending
  std::vector<uint32_t> tables = {};  ///< whose rows are written, ascending

  static constexpr auto kFields = fields(
      &WritePart::step, &WritePart::id, bounded(&WritePart::draft, kMaxPath), bounded(&WritePart::left, kMaxParameters),
      bounded(&WritePart::begun, kMaxParameters), bounded(&WritePart::tables, kMaxTables));
};

/// What the server holds of a parameter, and writes unless it is left to the chief.
struct PartOfParameter {
  uint32_t parameter = 0;
  uint8_t states = 0;  ///< bit i: state i; bit 3: the master copy
  double steps = 0;    ///< that its optimizer has counted

  static constexpr uint8_t kMaster = 3;
  static constexpr auto kFields =
      fields(&PartOfParameter::parameter, &PartOfParameter::states, &PartOfParameter::steps);

  bool operator==(const PartOfParameter&) const = default;
};

struct PartOfTable {
  uint64_t rows = 0;   ///< that the server keeps
  uint64_t steps = 0;  ///< that its optimizer has counted there

  static constexpr auto kFields = fields(&PartOfTable::rows, &PartOfTable::steps);

  bool operator==(const PartOfTable&) const = default;
};

/// The part is begun: what it is of will not change. Or it is not, and `refusal` says why the server cannot write
/// there, as on another host that does not see the folder; the rest is empty then.
struct WritesPart {
  static constexpr uint16_t kType = 41;
  std::vector<PartOfParameter> parameters =
      {};                                ///< of which the server has a piece; of several chunks, where they differ
  std::vector<PartOfTable> tables = {};  ///< all of the plan
  std::string refusal = {};

  static constexpr auto kFields =
      fields(bounded(&WritesPart::parameters, kMaxNumbers), bounded(&WritesPart::tables, kMaxTables),
             bounded(&WritesPart::refusal, kMaxPath));
};

}  // namespace muster::server
