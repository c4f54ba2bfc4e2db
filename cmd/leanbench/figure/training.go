package figure

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// drawTraining draws docs/train.svg from the output of examples/train:
//
//	go run ./examples/train >cmd/leanbench/figure/testdata/train.txt
//	go -C cmd/leanbench run . training -from figure/testdata/train.txt -o ../../docs/train.svg
func drawTraining(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	from := flags.String("from", "", "`file` with the output of examples/train")
	name := flags.String("o", "", "`file` to write the SVG to (default: standard output)")
	return func(stdout, _ io.Writer) error {
		if *from == "" {
			return errors.New("-from is needed: the output of examples/train")
		}
		data, err := os.ReadFile(*from)
		if err != nil {
			return err
		}
		t, err := parseTraining(data)
		if err != nil {
			return fmt.Errorf("-from %s: %w", *from, err)
		}
		if *name == "" {
			_, err := stdout.Write(t.draw())
			return err
		}
		return os.WriteFile(*name, t.draw(), 0o644)
	}
}

// training holds the two tables of examples/train.
type training struct{ loss, memory curves }

// curves are the rows of a table: x is the first column, and y the columns of the two attentions.
type curves struct {
	x []float64
	y [2][]float64
}

// last returns the last x; 0 for no rows.
func (c *curves) last() float64 {
	if len(c.x) == 0 {
		return 0
	}
	return c.x[len(c.x)-1]
}

// attentions are the heads of a table's columns.
var attentions = [2]string{"default", "lean"}

// parseTraining reads the tables. A table begins with its heads and ends before the first line that has no number first. All other
// lines are for people.
func parseTraining(data []byte) (*training, error) {
	t := new(training)
	tables := map[string]*curves{"step " + strings.Join(attentions[:], " "): &t.loss, "context " + strings.Join(attentions[:], " "): &t.memory}
	var now *curves
	lines := bufio.NewScanner(bytes.NewReader(data))
	for n := 1; lines.Scan(); n++ {
		fields := strings.Fields(lines.Text())
		if c, ok := tables[strings.Join(fields, " ")]; ok {
			now = c
			continue
		}
		if now == nil || len(fields) == 0 {
			now = nil
			continue
		}
		if _, err := strconv.ParseFloat(fields[0], 64); err != nil {
			now = nil
			continue
		}
		var row [3]float64
		valid := len(fields) == len(row)
		for i := range row {
			valid = valid && parseValue(fields[i], &row[i])
		}
		if !valid || row[0] <= now.last() {
			return nil, fmt.Errorf("line %d, %.60q: it must have three numbers from 0, and the first column must grow from above 0", n, lines.Text())
		}
		now.x = append(now.x, row[0])
		for i := range now.y {
			now.y[i] = append(now.y[i], row[1+i])
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(t.loss.x) == 0 || len(t.memory.x) == 0 {
		return nil, fmt.Errorf("%d rows of losses and %d of memory: is it the output of examples/train?", len(t.loss.x), len(t.memory.x))
	}
	return t, nil
}

// parseValue parses a number that can be drawn.
func parseValue(s string, to *float64) bool {
	x, err := strconv.ParseFloat(s, 64)
	*to = x
	return err == nil && x >= 0 && x < 1e15
}

// trainingStyle adds the lines of the two attentions to style.
const trainingStyle = style + `
.end{text-anchor:end}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.wide{stroke-width:7;stroke-opacity:.35}
.default{stroke:#b35900}
.lean{stroke:#2f6fb7}
.name{font-weight:600}
.name.default{fill:#b35900;stroke:none}
.name.lean{fill:#2f6fb7;stroke:none}
@media (prefers-color-scheme:dark){
.default{stroke:#e08f35}
.lean{stroke:#5b9be6}
.name.default{fill:#e08f35}
.name.lean{fill:#5b9be6}
}
`

// Sizes of docs/train.svg.
const (
	trainingH          = 330
	diagramW, diagramH = 300, 200
	diagramY           = 66
	lossX, memoryX     = 66, 452
)

// draw returns an SVG with a diagram of each table.
func (t *training) draw() []byte {
	c := new(canvas)
	c.begin(trainingH, "Loss and memory of training with the default attention and with leanattention", trainingStyle)
	loss := newDiagram(c, lossX, &t.loss)
	loss.frame("Loss, nats a character", "step", t.loss.x[0], t.loss.last())
	loss.line(0, "line wide") // below the other line, which hides it where both are equal
	loss.line(1, "line")
	memory := newDiagram(c, memoryX, &t.memory)
	memory.frame("Memory, MiB allocated a step", "context", t.memory.x[min(1, len(t.memory.x)-1):]...) // the first is too near to the axis
	for i, name := range attentions {
		memory.line(i, "line")
		last := t.memory.y[i][len(t.memory.x)-1]
		c.text("name end "+name, lossX+diagramW-8, diagramY+16+18*i, name)
		c.text("name end "+name, memoryX+diagramW-8, int(max(memory.py(last)-8, diagramY+14)), fmt.Sprintf("%s %.0f", name, last))
	}
	c.add(`</svg>`)
	return c.Bytes()
}

// diagram is a diagram of curves. Both axes begin at 0.
type diagram struct {
	*canvas
	*curves
	left       int
	right, top float64 // values at the ends of the axes
}

func newDiagram(c *canvas, left int, of *curves) *diagram {
	d := &diagram{canvas: c, curves: of, left: left, right: of.last()}
	for _, y := range of.y {
		for _, v := range y {
			d.top = max(d.top, v)
		}
	}
	d.top = ceiling(d.top)
	return d
}

// ceiling returns the first of 1, 2, 5, 10, 20 ... that is at least x.
func ceiling(x float64) float64 {
	for p := 1.0; ; p *= 10 {
		for _, f := range []float64{1, 2, 5} {
			if p*f >= x {
				return p * f
			}
		}
	}
}

// px and py return the coordinates of a point.
func (d *diagram) px(x float64) float64 { return float64(d.left) + x/d.right*diagramW }
func (d *diagram) py(y float64) float64 { return diagramY + diagramH - y/d.top*diagramH }

// frame draws the axes, with values at the ends and in the middle of the vertical one.
func (d *diagram) frame(title, axis string, ticks ...float64) {
	d.text("title", d.left, 36, title)
	d.add(`<path class="axis" d="M%d %dv%dh%d"/>`, d.left, diagramY, diagramH, diagramW)
	d.text("tick mid", d.left+diagramW/2, diagramY+diagramH+40, axis)
	for _, y := range []float64{0, d.top / 2, d.top} {
		d.text("tick end", d.left-8, int(d.py(y))+4, num(y))
	}
	for _, x := range ticks {
		d.text("tick mid", int(d.px(x)), diagramY+diagramH+18, num(x))
	}
}

// line draws the curve of an attention.
func (d *diagram) line(attention int, class string) {
	var path strings.Builder
	for i, x := range d.x {
		fmt.Fprintf(&path, "%c%.1f %.1f", "ML"[min(i, 1)], d.px(x), d.py(d.y[attention][i]))
	}
	d.add(`<path class="%s %s" d="%s"/>`, class, attentions[attention], path.String())
}
