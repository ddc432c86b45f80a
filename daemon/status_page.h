// The page for people at /: status_page.html, which polls /status.json and /waits.json and needs nothing else.
#pragma once

#include <string_view>

#include "daemon/http.h"

namespace moed {

/// The bytes of daemon/status_page.html.
extern const std::string_view kStatusPage;

/// The page with a policy under which a browser runs its one script and its one style, both named by hash, and loads
/// nothing from anywhere but this daemon.
HttpAnswer status_page();

}  // namespace moed
