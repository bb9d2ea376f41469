// SPDX-License-Identifier: Apache-2.0
const data = JSON.parse(document.getElementById('data').textContent)
document.querySelector('button').onclick = () => {
  const root = document.documentElement, dark = root.classList.contains('dark') ||
    (!root.classList.contains('light') &&
     matchMedia('(prefers-color-scheme: dark)').matches)
  root.className = dark ? 'light' : 'dark'
}
document.querySelectorAll('figure').forEach((figure, k) => {
  const svg = figure.querySelector('svg'), at = svg.querySelector('.at')
  const tip = figure.querySelector('.tip'), d = data[k]
  svg.onpointerleave = () => { at.style.visibility = 'hidden'; tip.textContent = '' }
  svg.onpointermove = e => {
    const box = svg.getBoundingClientRect()
    const x = (e.clientX - box.left) / box.width * d.wide
    const step = d.from + (x - d.left) / (d.wide - d.left - d.right) * (d.to - d.from)
    let best = null
    for (const r of d.runs) for (const p of r.points)
      if (best === null || Math.abs(p[0] - step) < Math.abs(best - step)) best = p[0]
    if (best === null) return
    const px = d.left + (best - d.from) / (d.to - d.from) * (d.wide - d.left - d.right)
    at.setAttribute('x1', px); at.setAttribute('x2', px)
    at.style.visibility = 'visible'
    tip.replaceChildren('step ' + best)
    for (const r of d.runs) {
      let near = null
      for (const p of r.points)
        if (near === null || Math.abs(p[0] - best) < Math.abs(near[0] - best)) near = p
      if (near === null) continue
      const mark = document.createElement('b'), line = document.createElement('i')
      mark.className = 'r' + r.run % 8
      mark.style.fontWeight = 'normal'; line.style.margin = '0 6px 0 16px'
      const value = near[1] === null ? 'not finite' : +near[1].toPrecision(6)
      mark.append(line, String(value))
      tip.append(mark)
    }
  }
})
