package figure

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// Parts of the drawings of schedules.

// Sizes in SVG units, which are pixels at the drawing's natural width.
const (
	width     = 800
	tileW     = 20  // width of a LeanTile
	tileH     = 26  // height of a bar
	rowH      = 34  // distance between two workers
	labelsX   = 22  // left edge of the labels
	panelX    = 92  // left edge of the first panel
	mergeGap  = 12  // from the end of the bars to the first merge line
	mergeStep = 14  // between merge lines
	mergesW   = 110 // maximum width of all merge lines
)

// style holds one rule per class. The drawing has its own background, so it is readable on any page, and it
// follows the reader's colour scheme.
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

// more is style with more colours and with a rule for small bars.
const more = style + `
.D{fill:#8a4fb0;stroke:#8a4fb0}
.E{fill:#b03a5b;stroke:#b03a5b}
.F{fill:#66721a;stroke:#66721a}
.small{stroke:none;fill-opacity:.5}
@media (prefers-color-scheme:dark){
.D{fill:#9a63bf;stroke:#b98ad8}
.E{fill:#c04f6f;stroke:#e0809b}
.F{fill:#7a8628;stroke:#a5b34a}
}
`

const palette = 6 // classes A to F

// canvas collects SVG elements. No text may contain a character that XML escapes.
type canvas struct{ bytes.Buffer }

func (c *canvas) add(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

func (c *canvas) text(class string, x, y int, s string) {
	c.add(`<text class="%s" x="%d" y="%d">%s</text>`, class, x, y, s)
}

func (c *canvas) rect(class string, x float64, y int, w float64, h int) {
	rx := 3
	if w < 8 || h < 8 {
		rx = 1
	}
	c.add(`<rect class="%s" x="%s" y="%d" width="%s" height="%d" rx="%d"/>`, class, num(x), y, num(w), h, rx)
}

// num formats x with at most two decimals.
func num(x float64) string { return strconv.FormatFloat(math.Round(x*100)/100, 'f', -1, 64) }

// begin writes the head of the file and the background.
func (c *canvas) begin(height int, title, style string) {
	c.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">`, width, height, width, height)
	c.add(`<title>%s</title>`, title)
	c.add(`<style>%s</style>`, style)
	c.add(`<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs>`)
	c.add(`<rect class="card" x=".5" y=".5" width="%d" height="%d" rx="8"/>`, width-1, height-1)
}

// frame is the position and scale of a panel's bars: LeanTile t of worker w is at (x + t*tileW, y + w*rowH).
type frame struct {
	x, y        int
	tileW       float64
	rowH, tileH int
}

// standard is the frame of docs/schedule.svg.
var standard = frame{tileW: tileW, rowH: rowH, tileH: tileH}

// at returns the left edge of a LeanTile.
func (f *frame) at(tile int64) float64 { return float64(f.x) + float64(tile)*f.tileW }

// row returns the top edge of a worker's bar.
func (f *frame) row(worker int) int { return f.y + worker*f.rowH }

// gap returns half the distance between two bars.
func (f *frame) gap() float64 { return min(1, f.tileW/8) }

// class returns the colour class of an output tile.
func class(output int) string { return string(rune('A' + output%palette)) }

// bar draws the LeanTiles of piece k. from is the number of LeanTiles that the worker computes before k.
func (c *canvas) bar(f frame, worker int, from int64, k piece) {
	kind, cut, label := "", "cut", "in"
	if !k.host() {
		if kind, cut, label = "partial", "soft", "in part"; f.tileH < 12 {
			kind = "partial small"
		}
	}
	x, y, n, wide := f.at(from), f.row(worker), k.len(), float64(k.len())*f.tileW
	c.rect(class(k.Output)+" "+kind, x+f.gap(), y, wide-2*f.gap(), f.tileH)
	if f.tileW >= 5 && f.tileH >= 12 {
		for t := int64(1); t < n; t++ {
			c.add(`<path class="%s" d="M%s %dv%d"/>`, cut, num(x+float64(t)*f.tileW), y+3, f.tileH-6)
		}
	}
	if wide < 12 || f.tileH < 16 {
		return
	}
	middle := x + wide/2
	if f.tileW >= 12 { // centred in a LeanTile, so that no line crosses the letter
		middle = x + float64((n-1)/2)*f.tileW + f.tileW/2
	}
	c.add(`<text class="%s" x="%s" y="%d">%c</text>`, label, num(middle), y+f.tileH/2+5, 'A'+k.Output%26)
}

// panel draws the bars of all workers, the merges and a time axis.
func (c *canvas) panel(f frame, s *schedule) {
	span, merges := s.span(), s.merges()
	step := mergeStep
	if n := lanes(merges); n*step > mergesW {
		if step = mergesW / n; step < 2 {
			merges = nil // too many lines to distinguish
		}
	}
	for w, pieces := range s.Workers {
		var at int64
		for _, k := range pieces {
			c.bar(f, w, at, k)
			at += k.len()
			if m := merges[k.Output]; m != nil && k.host() {
				c.merge(f, m, int(f.at(span))+mergeGap+m.lane*step)
			}
		}
		if at < span {
			c.rect("idle", f.at(at)+f.gap(), f.row(w), float64(span-at)*f.tileW-2*f.gap(), f.tileH)
		}
	}
	y, end := f.row(len(s.Workers))+8, int(f.at(span))
	c.add(`<path class="axis" d="M%d %dv8M%d %dv8M%d %dH%d"/>`, f.x+1, y-4, end-1, y-4, f.x+1, y, end-1)
}

// merge is an output tile whose partials are merged. A merge is drawn as a vertical line in a lane.
type merge struct {
	output, host, lane int
	workers            []int // sharers of the output tile, in ascending order
}

// merges returns the merge of each output tile with several pieces. No two lines of a lane overlap.
func (s *schedule) merges() map[int]*merge {
	all := make(map[int]*merge)
	var list []*merge
	for w, pieces := range s.Workers {
		for _, k := range pieces {
			if k.whole() {
				continue
			}
			m := all[k.Output]
			if m == nil {
				m = &merge{output: k.Output}
				all[k.Output], list = m, append(list, m)
			}
			if n := len(m.workers); n == 0 || m.workers[n-1] != w {
				m.workers = append(m.workers, w)
			}
			if k.host() {
				m.host = w
			}
		}
	}
	slices.SortStableFunc(list, func(a, b *merge) int { return cmp.Compare(a.workers[0], b.workers[0]) })
	var free []int // first free row of each lane
	for _, m := range list {
		for m.lane < len(free) && free[m.lane] > m.workers[0] {
			m.lane++
		}
		if m.lane == len(free) {
			free = append(free, 0)
		}
		free[m.lane] = m.workers[len(m.workers)-1] + 1
	}
	return all
}

// lanes returns the number of lanes.
func lanes(merges map[int]*merge) (n int) {
	for _, m := range merges {
		n = max(n, m.lane+1)
	}
	return n
}

// merge draws the line of m, with a filled circle at the host block and an open circle at each other worker
// of m.
func (c *canvas) merge(f frame, m *merge, x int) {
	y := func(w int) int { return f.row(w) + f.tileH/2 }
	name, r := class(m.output), 4
	if f.rowH < 10 {
		r = 1
	}
	c.add(`<path class="%s merge" d="M%d %dV%d"/>`, name, x, y(m.workers[0]), y(m.workers[len(m.workers)-1]))
	c.add(`<circle class="%s" cx="%d" cy="%d" r="%d"/>`, name, x, y(m.host), r)
	for _, w := range m.workers {
		if w != m.host {
			c.add(`<circle class="%s store" cx="%d" cy="%d" r="%d"/>`, name, x, y(w), r)
		}
	}
}

// legend draws the legend, with the first colour as the example.
func (c *canvas) legend(y int) {
	f := standard
	f.x, f.y = labelsX, y
	c.bar(f, 0, 0, piece{0, 0, 1, 1})
	c.text("note", f.x+28, y+18, "host block")
	f.x += 118
	c.bar(f, 0, 0, piece{0, 1, 2, 2})
	c.text("note", f.x+28, y+18, "partial")
	f.x += 96
	c.rect("idle", float64(f.x+1), y, tileW-2, tileH)
	c.text("note", f.x+28, y+18, "idle")
	x := f.x + 78
	c.add(`<path class="A merge" d="M%d %dH%d"/>`, x, y+tileH/2, x+24)
	c.add(`<circle class="A" cx="%d" cy="%d" r="4"/>`, x, y+tileH/2)
	c.add(`<circle class="A store" cx="%d" cy="%d" r="4"/>`, x+24, y+tileH/2)
	c.text("note", x+38, y+18, "partials merged into one output, in worker order")
}

// drawing returns an SVG of the schedules, one below the other, at the same scale.
func drawing(p *problem, all []*schedule) []byte {
	const top, head, foot = 54, 42, 56 // heights above all panels, above the bars of a panel, and below the bars of a panel
	f := frame{x: panelX, rowH: rowH}
	if p.workers > 12 {
		f.rowH = max(6, 12*rowH/p.workers)
	}
	f.tileH = f.rowH - max(2, f.rowH*(rowH-tileH)/rowH)
	var longest, largest float64 // in tokens
	for _, s := range all {
		longest, largest = max(longest, float64(s.span())*float64(s.Tile)), max(largest, float64(s.Tile))
	}
	token := min((width-panelX-labelsX-mergeGap-mergesW)/longest, 3*tileW/largest)
	panel := head + p.workers*f.rowH + foot
	end := top + len(all)*panel
	c := new(canvas)
	c.begin(end+tileH+18, p.String(), more)
	c.text("title", labelsX, 32, p.String())
	every := max(1, (13+f.rowH)/f.rowH) // distance between two labels, in rows
	for i, s := range all {
		y := top + i*panel
		c.text("title", f.x, y+14, s.title)
		c.text("note", f.x, y+32, s.note)
		f.y, f.tileW = y+head, token*float64(s.Tile)
		for w := 0; w < p.workers; w += every {
			c.text("note", labelsX, f.row(w)+f.tileH/2+5, fmt.Sprintf("worker %d", w))
		}
		c.panel(f, s)
		c.text("", f.x, f.row(p.workers)+28, fmt.Sprintf("%d LeanTiles of %d tokens long, %.1f%% busy, waves: %d, partials: %d, workspace: %s",
			s.span(), s.Tile, 100*s.occupancy(), s.waves(), s.partials(), bytesOf(s.Workspace)))
	}
	c.legend(end)
	c.add(`</svg>`)
	return c.Bytes()
}
