// Sets the light or dark theme before anything is drawn: the user's choice, or the system's setting.
function applyTheme(choice) {
  const dark = choice === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : choice === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}
function storedTheme() {
  try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
}
applyTheme(storedTheme());
