// Package figure draws how schedules distribute LeanTiles over workers. It draws docs/schedule.svg, and any
// decode step as text, SVG or JSON. It also draws docs/train.svg, from the output of examples/train.
package figure

import (
	"flag"
	"fmt"
	"io"
	"os"

	"gorgonia.org/leanattention/internal/lean"

	"gorgonia.org/leanattention/cmd/leanbench/command"
)

// Commands lists the commands of this package.
var Commands = []command.Command{
	{Name: "schedule", Summary: "draw who computes what under each schedule, in the terminal and as SVG", Setup: drawSchedules},
	{Name: "figure", Summary: "draw the schedules of docs/schedule.svg", Setup: drawFigure},
	{Name: "training", Summary: "draw the losses and the memory of examples/train: docs/train.svg", Setup: drawTraining},
}

// drawFigure draws how the three policies distribute the LeanTiles of a ragged batch over workers.
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

// The example has five workers and three sequences of one head. The contexts differ as in a batch of chats.
var (
	contexts = []int64{10, 4, 1}
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

const (
	height  = legendY + tileH + 18
	panelW  = 236 // distance between two panels
	stripY  = 52  // top of the strip with all LeanTiles
	titleY  = 144 // baseline of the panels' titles
	rowsY   = 178 // top of the first worker's bar
	timeY   = rowsY + workers*rowH + 8
	legendY = timeY + 52
)

// Schedules returns docs/schedule.svg.
func Schedules() []byte {
	c := new(canvas)
	c.begin(height, "LeanTile schedules of FlashAttention-2, FlashDecoding and LeanAttention for one ragged batch", style)
	c.strip()
	for w := range workers {
		c.text("note", labelsX, rowsY+w*rowH+18, fmt.Sprintf("worker %d", w))
	}
	c.text("note", labelsX, timeY+5, "time")
	for i, p := range panels {
		x := panelX + i*panelW
		c.text("title", x, titleY, p.title)
		c.text("note", x, titleY+18, p.subtitle)
		s := &schedule{Workers: planPieces(plan(p.policy), workers)}
		f := standard
		f.x, f.y = x, rowsY
		c.panel(f, s)
		c.text("", x, timeY+22, fmt.Sprintf("%d LeanTiles long, %d%% busy", s.span(), int(100*s.occupancy()+1e-9)))
	}
	c.legend(legendY)
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

// strip draws all LeanTiles in linear order, and the cuts of stream-K.
func (c *canvas) strip() {
	c.text("note", labelsX, stripY-14, "The contexts of three sequences as LeanTiles, in linear order")
	x, f := panelX, standard
	f.x, f.y = panelX, stripY
	var at int64
	for i, n := range contexts {
		c.bar(f, 0, at, piece{i, 0, n, n})
		at += n
		x += int(n) * tileW
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
