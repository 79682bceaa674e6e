// The start of everything. No libraries, nothing from elsewhere.

import "./chat.js";
import { drawHistory, drawLanes, watch } from "./live.js";
import { showModel } from "./model.js";

showModel();
drawHistory();
requestAnimationFrame(drawLanes);
watch();
