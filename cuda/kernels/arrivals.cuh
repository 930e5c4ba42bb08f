// Who arrives at the mbarriers. tests/sanitize.py puts another file in the place of this one.
#pragma once

namespace ptx {

// One lane arrives for its warp; if true, every lane for itself, as racecheck needs to follow them:
// then each barrier counts lanes, and what one thread does alone counts as 32.
inline constexpr bool kEveryLaneArrives = false;

}  // namespace ptx
