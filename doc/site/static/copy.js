// Give each block of code a button that copies it; of a console only the commands.
for (const block of navigator.clipboard ? document.querySelectorAll("div.highlight") : []) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    let text = block.querySelector("pre").textContent;
    if (block.closest(".highlight-console")) {
      const commands = text.split("\n").filter((line) => line.startsWith("$ "));
      text = commands.map((line) => `${line.slice(2)}\n`).join("");
    }
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.append(button);
}
