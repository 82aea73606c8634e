// Before anything is drawn, so that a dark page never flashes white: the theme that was chosen, or the system's.
(function () {
  try {
    const chosen = localStorage.getItem("tandem.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch (error) {
    // A browser that keeps nothing goes by the system's.
  }
})();
