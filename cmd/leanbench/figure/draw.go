package figure

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// What drawings of schedules are made of.

// Sizes in the SVG's units, which are pixels at its natural width.
const (
	width     = 800
	tileW     = 20  // width of a LeanTile
	tileH     = 26  // height of a bar
	rowH      = 34  // distance of two workers
	labelsX   = 22  // left edge of the labels
	panelX    = 92  // left edge of the first panel
	mergeGap  = 12  // from the end of the bars to the first merge line
	mergeStep = 14  // between merge lines
	mergesW   = 110 // what all merge lines may take
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

// more is style with further colours, and what small bars look like.
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

// canvas collects SVG elements. No text in it has a character that XML has to escape.
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

// num is x with two digits behind the point at most.
func num(x float64) string { return strconv.FormatFloat(math.Round(x*100)/100, 'f', -1, 64) }

// begin is the head of the file, and the background.
func (c *canvas) begin(height int, title, style string) {
	c.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">`, width, height, width, height)
	c.add(`<title>%s</title>`, title)
	c.add(`<style>%s</style>`, style)
	c.add(`<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs>`)
	c.add(`<rect class="card" x=".5" y=".5" width="%d" height="%d" rx="8"/>`, width-1, height-1)
}

// frame is where the bars of a panel are: LeanTile t of worker w is at (x + t*tileW, y + w*rowH).
type frame struct {
	x, y        int
	tileW       float64
	rowH, tileH int
}

// standard is the frame of docs/schedule.svg.
var standard = frame{tileW: tileW, rowH: rowH, tileH: tileH}

// at is where a LeanTile begins.
func (f *frame) at(tile int64) float64 { return float64(f.x) + float64(tile)*f.tileW }

// row is the top of a worker's bar.
func (f *frame) row(worker int) int { return f.y + worker*f.rowH }

// gap is what lies between two bars, half of it.
func (f *frame) gap() float64 { return min(1, f.tileW/8) }

// class is the colour of an output tile.
func class(output int) string { return string(rune('A' + output%palette)) }

// bar draws the LeanTiles of a piece that begins behind others of its worker.
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
	if f.tileW >= 12 { // between two lines, so that none crosses the letter
		middle = x + float64((n-1)/2)*f.tileW + f.tileW/2
	}
	c.add(`<text class="%s" x="%s" y="%d">%c</text>`, label, num(middle), y+f.tileH/2+5, 'A'+k.Output%26)
}

// panel draws what each worker does over time, what is merged, and an axis.
func (c *canvas) panel(f frame, s *schedule) {
	span, merges := s.span(), s.merges()
	step := mergeStep
	if n := lanes(merges); n*step > mergesW {
		if step = mergesW / n; step < 2 {
			merges = nil // nobody could tell one from another
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

// merge is an output tile whose partials come together, along a line of its own in a lane.
type merge struct {
	output, host, lane int
	workers            []int // that have a part, in order
}

// merges are those of all output tiles that several pieces have. Lanes are such that no two lines overlap.
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
	var free []int // the first row that each lane leaves free
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

// lanes is how many there are.
func lanes(merges map[int]*merge) (n int) {
	for _, m := range merges {
		n = max(n, m.lane+1)
	}
	return n
}

// merge draws the line of m: a full circle at the host block and an open one at each other sharer.
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

// legend explains bars and circles with the first colour.
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

// drawing is schedules one below the other, at one scale, as SVG.
func drawing(p *problem, all []*schedule) []byte {
	const top, head, foot = 54, 42, 56 // above all panels, and above and below the bars of each
	f := frame{x: panelX, rowH: rowH}
	if p.workers > 12 {
		f.rowH = max(6, 12*rowH/p.workers)
	}
	f.tileH = f.rowH - max(2, f.rowH*(rowH-tileH)/rowH)
	var longest, largest float64 // tokens
	for _, s := range all {
		longest, largest = max(longest, float64(s.span())*float64(s.Tile)), max(largest, float64(s.Tile))
	}
	token := min((width-panelX-labelsX-mergeGap-mergesW)/longest, 3*tileW/largest)
	panel := head + p.workers*f.rowH + foot
	end := top + len(all)*panel
	c := new(canvas)
	c.begin(end+tileH+18, p.String(), more)
	c.text("title", labelsX, 32, p.String())
	every := max(1, (13+f.rowH)/f.rowH) // rows that have a label
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
