// Before anything is drawn: light or dark, as chosen before or as the system has it.
function applyTheme(choice) {
  const dark = choice === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : choice === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}
function storedTheme() {
  try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
}
applyTheme(storedTheme());
