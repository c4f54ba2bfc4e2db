// Package figure draws how schedules hand LeanTiles to workers.
package figure

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"

	"gorgonia.org/leanattention/internal/lean"

	"gorgonia.org/leanattention/cmd/leanbench/command"
)

// Commands are those of this package.
var Commands = []command.Command{
	{Name: "figure", Summary: "draw the schedules of docs/schedule.svg", Setup: drawFigure},
}

// drawFigure draws how the three policies hand the LeanTiles of a ragged batch to
// workers.
func drawFigure(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	name := flags.String("o", "", "`file` to write the SVG to (default: standard output)")
	return func(stdout, _ io.Writer) error {
		svg := Schedules()
		if *name == "" {
			_, err := stdout.Write(svg)
			return err
		}
		return os.WriteFile(*name, svg, 0o644)
	}
}

// The example: three sequences of one head, whose contexts differ as those of a
// batch of chats do, on five workers.
var (
	contexts = []int64{10, 4, 1}
	names    = []string{"A", "B", "C"}
	panels   = []struct {
		title, subtitle string
		policy          lean.Policy
	}{
		{"FlashAttention-2", "one worker for each output", lean.Policy{Kind: lean.PerHead}},
		{"FlashDecoding", "every context in 2 splits", lean.Policy{Kind: lean.FixedSplit, Splits: 2}},
		{"LeanAttention", "stream-K: equal shares", lean.Policy{Kind: lean.StreamK}},
	}
)

const workers = 5

// Sizes in the SVG's units, which are pixels at its natural width.
const (
	width     = 800
	height    = legendY + tileH + 18
	tileW     = 20  // width of a LeanTile
	tileH     = 26  // height of a bar
	rowH      = 34  // distance of two workers
	labelsX   = 22  // left edge of the labels
	panelX    = 92  // left edge of the first panel
	panelW    = 236 // distance of two panels
	stripY    = 52  // top of the strip with all LeanTiles
	titleY    = 144 // baseline of the panels' titles
	rowsY     = 178 // top of the first worker's bar
	timeY     = rowsY + workers*rowH + 8
	legendY   = timeY + 52
	mergeGap  = 12 // from the end of the bars to the first merge line
	mergeStep = 14 // between merge lines
)

// style holds one rule a class. The figure has its own background, so that it
// can be read wherever it is shown, and follows the reader's colour scheme.
const style = `
.card{fill:#fff;stroke:#d0d7de}
text{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.title{font-size:16px;font-weight:600}
.note{fill:#59636e}
.in{font-weight:600;fill:#fff;text-anchor:middle}
.part{fill:#1f2328}
.mid{text-anchor:middle}
.A{fill:#2f6fb7;stroke:#2f6fb7}
.B{fill:#b35900;stroke:#b35900}
.C{fill:#1a7f5a;stroke:#1a7f5a}
.partial{fill-opacity:.22;stroke-width:1.5;stroke-dasharray:4 3}
.merge{fill:none;stroke-width:1.5}
.store{fill:#fff;stroke-width:1.5}
.cut{stroke:#fff;stroke-opacity:.55}
.soft{stroke:#1f2328;stroke-opacity:.2}
.idle{fill:url(#idle);stroke:#afb8c1}
.hatch{stroke:#afb8c1}
.axis{stroke:#59636e;fill:none}
.tick{fill:#59636e}
@media (prefers-color-scheme:dark){
.card{fill:#0d1117;stroke:#3d444d}
text{fill:#f0f6fc}
.note{fill:#9198a1}
.in{fill:#fff}
.part{fill:#f0f6fc}
.A{fill:#3f80cc;stroke:#5b9be6}
.B{fill:#b86a14;stroke:#e08f35}
.C{fill:#23855f;stroke:#3fb384}
.partial{fill-opacity:.3}
.store{fill:#0d1117}
.soft{stroke:#f0f6fc}
.idle{stroke:#4a525c}
.hatch{stroke:#4a525c}
.axis{stroke:#9198a1}
.tick{fill:#9198a1}
}
`

// canvas collects SVG elements.
type canvas struct{ bytes.Buffer }

func (c *canvas) add(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

func (c *canvas) text(class string, x, y int, s string) {
	c.add(`<text class="%s" x="%d" y="%d">%s</text>`, class, x, y, s)
}

func (c *canvas) rect(class string, x, y, w, h int) {
	c.add(`<rect class="%s" x="%d" y="%d" width="%d" height="%d" rx="3"/>`, class, x, y, w, h)
}

// Schedules returns the figure as SVG.
func Schedules() []byte {
	c := new(canvas)
	c.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">`, width, height, width, height)
	c.add(`<title>LeanTile schedules of FlashAttention-2, FlashDecoding and LeanAttention for one ragged batch</title>`)
	c.add(`<style>%s</style>`, style)
	c.add(`<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs>`)
	c.add(`<rect class="card" x=".5" y=".5" width="%d" height="%d" rx="8"/>`, width-1, height-1)
	c.strip()
	for w := range workers {
		c.text("note", labelsX, rowsY+w*rowH+18, fmt.Sprintf("worker %d", w))
	}
	c.text("note", labelsX, timeY+5, "time")
	for i, p := range panels {
		x := panelX + i*panelW
		c.text("title", x, titleY, p.title)
		c.text("note", x, titleY+18, p.subtitle)
		c.panel(x, plan(p.policy))
	}
	c.legend()
	c.add(`</svg>`)
	return c.Bytes()
}

func plan(policy lean.Policy) *lean.Plan {
	p := new(lean.Plan)
	p.Reset(1)
	for _, n := range contexts {
		p.Add([]int64{n})
	}
	p.Cut(policy, workers)
	return p
}

// strip draws all LeanTiles in their linear order, and where stream-K cuts them.
func (c *canvas) strip() {
	c.text("note", labelsX, stripY-14, "The contexts of three sequences as LeanTiles, in linear order")
	x := panelX
	for i, n := range contexts {
		w := int(n) * tileW
		c.bar(names[i], "", x, stripY, int(n))
		x += w
	}
	tick := func(x int) {
		c.add(`<path class="tick" d="M%d %dl4 7h-8z"/>`, x, stripY+tileH+3)
	}
	p := plan(lean.Policy{Kind: lean.StreamK})
	for w := 1; w < p.Workers(); w++ {
		begin, _ := p.Range(w)
		tick(panelX + int(begin)*tileW)
	}
	tick(x + 24)
	c.text("note", x+34, stripY+tileH+12, fmt.Sprintf("LeanAttention's cuts: %d equal shares", p.Workers()))
}

// bar draws the LeanTiles of one Work, marked as a partial or not.
func (c *canvas) bar(name, kind string, x, y, tiles int) {
	cut, label := "cut", "in"
	if kind == "partial" {
		cut, label = "soft", "in part"
	}
	c.rect(name+" "+kind, x+1, y, tiles*tileW-2, tileH)
	for t := 1; t < tiles; t++ {
		c.add(`<path class="%s" d="M%d %dv%d"/>`, cut, x+t*tileW, y+3, tileH-6)
	}
	// Between two lines, so that none crosses the letter.
	c.text(label, x+(tiles-1)/2*tileW+tileW/2, y+18, name)
}

// panel draws what each worker does over time, and what is merged.
func (c *canvas) panel(x int, p *lean.Plan) {
	span := span(p)
	mergeX, free := x+span*tileW+mergeGap, 0 // the next merge line, and the first row that the last one leaves free
	for w := range workers {
		y := rowsY + w*rowH
		at := 0
		if w < p.Workers() {
			it := p.Work(w)
			for k, ok := it.Next(); ok; k, ok = it.Next() {
				kind := ""
				if !k.Host() {
					kind = "partial"
				}
				n := int(k.End - k.Begin)
				c.bar(names[k.Seq], kind, x+at*tileW, y, n)
				at += n
				if k.Host() && !k.Finishing() {
					if w < free {
						mergeX += mergeStep
					}
					free = c.merge(names[k.Seq], p, k, mergeX) + 1
				}
			}
		}
		if at < span {
			c.rect("idle", x+at*tileW+1, y, (span-at)*tileW-2, tileH)
		}
	}
	end := x + span*tileW
	c.add(`<path class="axis" d="M%d %dv8M%d %dv8M%d %dH%d"/>`, x+1, timeY-4, end-1, timeY-4, x+1, timeY, end-1)
	c.text("", x, timeY+22, fmt.Sprintf("%d LeanTiles long, %d%% busy", span, int(p.Tiles())*100/(span*workers)))
}

// span returns the LeanTiles of the worker with the most: how long the plan takes.
func span(p *lean.Plan) int {
	var most int64
	for w := range p.Workers() {
		begin, end := p.Range(w)
		most = max(most, end-begin)
	}
	return int(most)
}

// merge draws the line along which the partials of k's output come together: a
// full circle at the host block and an open one at each other sharer. It returns
// the last sharer.
func (c *canvas) merge(name string, p *lean.Plan, k lean.Work, x int) (last int) {
	first, last, _ := p.Sharers(k)
	y := func(w int) int { return rowsY + w*rowH + tileH/2 }
	c.add(`<path class="%s merge" d="M%d %dV%d"/>`, name, x, y(first), y(last))
	c.add(`<circle class="%s" cx="%d" cy="%d" r="4"/>`, name, x, y(first))
	for w := first + 1; w <= last; w++ {
		c.add(`<circle class="%s store" cx="%d" cy="%d" r="4"/>`, name, x, y(w))
	}
	return last
}

// legend explains bars and circles with the first sequence's colour.
func (c *canvas) legend() {
	x := labelsX
	c.bar("A", "", x, legendY, 1)
	c.text("note", x+28, legendY+18, "host block")
	x += 118
	c.bar("A", "partial", x, legendY, 1)
	c.text("note", x+28, legendY+18, "partial")
	x += 96
	c.rect("idle", x+1, legendY, tileW-2, tileH)
	c.text("note", x+28, legendY+18, "idle")
	x += 78
	c.add(`<path class="A merge" d="M%d %dH%d"/>`, x, legendY+tileH/2, x+24)
	c.add(`<circle class="A" cx="%d" cy="%d" r="4"/>`, x, legendY+tileH/2)
	c.add(`<circle class="A store" cx="%d" cy="%d" r="4"/>`, x+24, legendY+tileH/2)
	c.text("note", x+38, legendY+18, "partials merged into one output, in worker order")
}
