// Set the chosen or the system's theme before anything is drawn, so that a dark page never flashes white.
(function () {
  try {
    const chosen = localStorage.getItem("tandem.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch (error) {
    // Without storage, use the system's theme.
  }
})();
