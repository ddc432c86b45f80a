// moectl status: what a daemon says of itself.
#pragma once

#include <string>

namespace moed::ctl {

/// Asks the daemon at `socket` (empty: libmoed's choice) and prints its JSON as it came, or as a table; an exit code.
int run_status(const std::string& socket, bool json);

/// The table made of the daemon's JSON; empty: it is no JSON object.
std::string status_table(const std::string& json);

}  // namespace moed::ctl
