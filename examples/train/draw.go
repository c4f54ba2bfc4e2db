package main

import (
	"bytes"
	"fmt"
	"math"
)

// Sizes in the SVG's units, which are pixels at its natural width.
const (
	panelW, panelH = 300, 200
	leftX, rightX  = 66, 452
	topY           = 66
)

const style = `
.card{fill:#fff;stroke:#d0d7de}
text{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}
.tick{fill:#59636e}
.end{text-anchor:end}
.mid{text-anchor:middle}
.axis{stroke:#59636e;fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.wide{stroke-width:7;stroke-opacity:.35}
.default{stroke:#b35900}
.lean{stroke:#2f6fb7}
.name{font-weight:600}
.name.default{fill:#b35900;stroke:none}
.name.lean{fill:#2f6fb7;stroke:none}
@media (prefers-color-scheme:dark){
.card{fill:#0d1117;stroke:#3d444d}
text{fill:#f0f6fc}
.tick{fill:#9198a1}
.axis{stroke:#9198a1}
.default{stroke:#e08f35}
.lean{stroke:#5b9be6}
.name.default{fill:#e08f35}
.name.lean{fill:#5b9be6}
}
`

// draw draws the losses and the memory.
func draw(results []result) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 330" width="800" height="330" role="img">
<title>Loss and memory of training with the default attention and with leanattention</title>
<style>%s</style>
<rect class="card" x=".5" y=".5" width="799" height="329" rx="6"/>
`, style)
	steps, highest := len(results[0].losses), 0.0
	for _, r := range results {
		for _, l := range r.losses {
			highest = math.Max(highest, l)
		}
	}
	loss := panel{&b, leftX, float64(steps), ceiling(highest)}
	loss.frame("Loss, nats a character", "step")
	loss.xTick(1, "1")
	loss.xTick(float64(steps), fmt.Sprint(steps))

	highest = 0
	for _, r := range results {
		for _, m := range r.memory {
			highest = math.Max(highest, m/(1<<20))
		}
	}
	memory := panel{&b, rightX, float64(contexts[len(contexts)-1]), ceiling(highest)}
	memory.frame("Memory, MiB allocated a step", "context")
	for _, n := range contexts[1:] {
		memory.xTick(float64(n), fmt.Sprint(n))
	}
	for i, r := range results {
		class := "line " + r.name
		if i == 0 && len(results) > 1 {
			class += " wide" // under the other line, which hides it where they are equal
		}
		var x, y []float64
		for j, l := range r.losses {
			x, y = append(x, float64(j+1)), append(y, l)
		}
		loss.line(class, x, y)
		x, y = nil, nil
		for j, n := range contexts {
			x, y = append(x, float64(n)), append(y, r.memory[j]/(1<<20))
		}
		memory.line("line "+r.name, x, y)
		last := y[len(y)-1]
		fmt.Fprintf(&b, `<text class="name end %s" x="%.1f" y="%.1f">%s %.0f</text>`+"\n",
			r.name, memory.px(memory.right)-8, math.Max(memory.py(last)-8, topY+14), r.name, last)
		fmt.Fprintf(&b, `<text class="name end %s" x="%d" y="%d">%s</text>`+"\n", r.name, leftX+panelW-8, topY+16+18*i, r.name)
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// ceiling returns the first of 1, 2, 5, 10, 20 ... that is at least x.
func ceiling(x float64) float64 {
	for p := 1.0; ; p *= 10 {
		for _, f := range []float64{1, 2, 5} {
			if p*f >= x || math.IsInf(p, 1) {
				return p * f
			}
		}
	}
}

// panel is one of the two diagrams; both axes begin at 0.
type panel struct {
	*bytes.Buffer
	left       float64 // position on the page
	right, top float64 // the axes' ends
}

// px and py return the coordinates of a point on the page.
func (p panel) px(x float64) float64 { return p.left + x/p.right*panelW }
func (p panel) py(y float64) float64 { return topY + panelH - y/p.top*panelH }

func (p panel) frame(title, axis string) {
	fmt.Fprintf(p, `<text class="title" x="%.0f" y="36">%s</text>`+"\n", p.left, title)
	fmt.Fprintf(p, `<path class="axis" d="M%.1f %dv%dh%d"/>`+"\n", p.left, topY, panelH, panelW)
	fmt.Fprintf(p, `<text class="tick mid" x="%.1f" y="%d">%s</text>`+"\n", p.left+panelW/2, topY+panelH+40, axis)
	for _, y := range []float64{0, p.top / 2, p.top} {
		fmt.Fprintf(p, `<text class="tick end" x="%.1f" y="%.1f">%.4g</text>`+"\n", p.left-8, p.py(y)+4, y)
	}
}

func (p panel) xTick(x float64, label string) {
	fmt.Fprintf(p, `<text class="tick mid" x="%.1f" y="%d">%s</text>`+"\n", p.px(x), topY+panelH+18, label)
}

func (p panel) line(class string, x, y []float64) {
	fmt.Fprintf(p, `<path class="%s" d="`, class)
	for i := range x {
		fmt.Fprintf(p, "%c%.1f %.1f", "ML"[min(i, 1)], p.px(x[i]), p.py(y[i]))
	}
	p.WriteString(`"/>` + "\n")
}
