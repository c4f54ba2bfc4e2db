package report

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// palette holds colours that colour-blind readers can distinguish (Okabe and Ito).
var palette = []color.Color{
	color.RGBA{0, 114, 178, 255}, color.RGBA{230, 159, 0, 255}, color.RGBA{0, 158, 115, 255},
	color.RGBA{204, 121, 167, 255}, color.RGBA{86, 180, 233, 255}, color.RGBA{120, 120, 120, 255},
	color.RGBA{213, 94, 0, 255},
}

// colour returns the colour that tint names, or else the colour of the series' position.
func (c column) colour(place int) color.Color {
	if c.tint > 0 {
		place = c.tint - 1
	}
	return palette[place%len(palette)]
}

func init() { plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"} }

// dark makes a picture follow the reader's colour scheme: black becomes light, and white becomes dark.
const dark = `<style>@media (prefers-color-scheme:dark){text,path[style*="fill:#000000"]{fill:#c9d1d9!important}path[style*="fill:#FFFFFF"]{fill:#0d1117!important}path[style*="stroke:#000000"]{stroke:#c9d1d9!important}}</style>
`

// draw returns the picture of a question as SVG.
func (t *tables) draw(q question) ([]byte, error) {
	p := plot.New()
	p.Title.Text = q.title
	p.X.Label.Text, p.Y.Label.Text = q.picture.x, q.picture.y
	p.Legend.Top = true
	if q.picture.logX {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	if q.picture.logY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	height := 9 * vg.Centimeter
	var err error
	switch q.picture.kind {
	case "bars", "dots":
		height, err = t.drawBars(p, q)
	case "lines":
		err = t.drawLines(p, q)
	case "points":
		err = t.drawPoints(p, q)
	default:
		err = fmt.Errorf("no picture is called %q", q.picture.kind)
	}
	if err != nil {
		return nil, err
	}
	c := vgsvg.New(pictureWidth, height)
	all := draw.New(c)
	all.FillPolygon(p.BackgroundColor, []vg.Point{all.Min, {X: all.Max.X, Y: all.Min.Y}, all.Max, {X: all.Min.X, Y: all.Max.Y}})
	p.Draw(draw.Crop(all, vg.Points(3), -vg.Points(12), vg.Points(3), -vg.Points(3))) // margins for the titles and for half of the last number
	var out bytes.Buffer
	if _, err := c.WriteTo(&out); err != nil {
		return nil, err
	}
	svg := bytes.Replace(out.Bytes(), []byte("<g transform"), []byte(dark+"<g transform"), 1)
	// The other fonts have the same character widths as Liberation Sans.
	return bytes.ReplaceAll(svg, []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")), nil
}

const pictureWidth = 22 * vg.Centimeter

// steps marks an axis from 0 with about six labelled ticks. The distance is 1, 2 or 5 times a power of ten.
type steps struct{}

func (steps) Ticks(least, most float64) (marks []plot.Tick) {
	step := math.Pow(10, math.Floor(math.Log10((most-least)/6)))
	for _, by := range []float64{2, 2.5, 2} { // 2, 5 and 10 times as much
		if (most-least)/step > 8 {
			step *= by
		}
	}
	for n := math.Ceil(least / step); n*step <= most; n++ {
		marks = append(marks, plot.Tick{Value: n * step, Label: fmt.Sprintf("%.6g", n*step)})
	}
	return marks
}

// value returns the value that the picture shows of a figure.
func (p picture) value(f *measure.Figure) float64 {
	if p.percent {
		return 100 * f.Value
	}
	return f.Value
}

// limit returns the bar in the picture's unit.
func (p picture) limit() float64 {
	if p.percent {
		return 100 * p.bar
	}
	return p.bar
}

// drawn returns the question as its picture shows it. If the picture's series are contenders, each case is
// one group of bars, even if the table has a line per contender.
func (q question) drawn() question {
	for _, s := range q.picture.series {
		q.contenders = q.contenders && s.who == ""
	}
	return q
}

// drawBars draws a group of bars, or of dots, for each line of the table, from top to bottom.
func (t *tables) drawBars(p *plot.Plot, q question) (vg.Length, error) {
	rows := t.rows(q.drawn(), q.tables...)
	thick := vg.Points(5)
	groups := 0
	var labels []string
	values := make([]plotter.Values, len(q.picture.series))
	for i := len(rows) - 1; i >= 0; i-- { // the first line is the topmost
		found := false
		line := make([]float64, len(values))
		for j, s := range q.picture.series {
			if f := rows[i].cells[cellKey(s.series, s.who, s.metric)]; f != nil {
				line[j], found = q.picture.value(f), true
			}
		}
		if !found {
			continue
		}
		groups++
		labels = append(labels, strings.ReplaceAll(rows[i].label, " | ", ", "))
		for j, v := range line {
			values[j] = append(values[j], v)
		}
	}
	if groups == 0 {
		return 0, fmt.Errorf("there is nothing to draw")
	}
	for j, v := range values {
		if q.picture.kind == "dots" {
			xy := make(plotter.XYs, groups)
			for i, x := range v {
				xy[i] = plotter.XY{X: x, Y: float64(i)}
			}
			points, err := plotter.NewScatter(xy)
			if err != nil {
				return 0, err
			}
			points.Color, points.Shape, points.Radius = q.picture.series[j].colour(j), draw.CircleGlyph{}, vg.Points(3)
			p.Add(points)
			p.Legend.Add(q.picture.series[j].head, points)
			continue
		}
		b, err := plotter.NewBarChart(v, thick)
		if err != nil {
			return 0, err
		}
		b.Horizontal, b.LineStyle.Width, b.Color = true, 0, q.picture.series[j].colour(j)
		b.Offset = thick * vg.Length(float64(len(values)-1)/2-float64(j))
		p.Add(b)
		if len(values) > 1 {
			p.Legend.Add(q.picture.series[j].head, b)
		}
	}
	p.NominalY(labels...)
	p.Y.Min, p.Y.Max = -0.5, float64(groups)-0.5
	if q.picture.kind == "bars" {
		p.X.Min = 0
	}
	if q.picture.bar > 0 {
		line, err := plotter.NewLine(plotter.XYs{{X: q.picture.limit(), Y: -0.5}, {X: q.picture.limit(), Y: float64(groups) - 0.5}})
		if err != nil {
			return 0, err
		}
		line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		p.Add(line)
	}
	p.Legend.Top = false
	p.X.Tick.Marker = steps{}
	if len(values) > 1 { // space for the legend
		most := func(texts []string) (width vg.Length) {
			for _, text := range texts {
				width = max(width, p.Legend.TextStyle.Width(text))
			}
			return width
		}
		var heads []string
		for _, s := range q.picture.series {
			heads = append(heads, s.head)
		}
		inside := pictureWidth - most(labels) - vg.Points(40)
		share := float64((most(heads) + p.Legend.ThumbnailWidth + vg.Points(12)) / inside)
		p.X.Max = p.X.Min + (p.X.Max-p.X.Min)/(1-min(share, 0.6))
	}
	each := thick*vg.Length(len(values)) + vg.Points(7)
	return max(6*vg.Centimeter, vg.Length(groups)*each+2*vg.Centimeter), nil
}

// drawLines draws a line for each series. The x value is the number in a table line's label.
func (t *tables) drawLines(p *plot.Plot, q question) error {
	rows := t.rows(q.drawn(), q.tables...)
	var ticks plot.ConstantTicks
	for j, s := range q.picture.series {
		var xy plotter.XYs
		for _, r := range rows {
			x, err := strconv.ParseFloat(r.label, 64)
			if err != nil {
				return err
			}
			if f := r.cells[cellKey(s.series, s.who, s.metric)]; f != nil {
				xy = append(xy, plotter.XY{X: x, Y: q.picture.value(f)})
				if mark := (plot.Tick{Value: x, Label: r.label}); !slices.Contains(ticks, mark) {
					ticks = append(ticks, mark)
				}
			}
		}
		line, points, err := plotter.NewLinePoints(xy)
		if err != nil {
			return fmt.Errorf("%s: %w", s.head, err)
		}
		line.Color, points.Color = s.colour(j), s.colour(j)
		line.Width, points.Shape, points.Radius = vg.Points(1.5), draw.CircleGlyph{}, vg.Points(2)
		if s.dashed {
			line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		}
		p.Add(line, points)
		p.Legend.Add(s.head, line, points)
	}
	p.Legend.Left = true
	if q.picture.ticks {
		p.X.Tick.Marker = ticks
		p.X.Max *= math.Pow(p.X.Max/p.X.Min, 0.03) // space for half a number
	}
	if q.picture.bar > 0 {
		line, err := plotter.NewLine(plotter.XYs{{X: p.X.Min, Y: q.picture.limit()}, {X: p.X.Max, Y: q.picture.limit()}})
		if err != nil {
			return err
		}
		line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		p.Add(line)
	}
	if !q.picture.logY {
		p.Y.Min, p.Y.Max = 0, 1.4*p.Y.Max // space for the legend
	}
	return nil
}

// drawPoints draws a point for each case. The x value is the time of the launch.
func (t *tables) drawPoints(p *plot.Plot, q question) error {
	s := q.picture.series[0]
	var sets [2]plotter.XYs // head dimensions 64 and 128
	for _, r := range t.rows(question{}, q.points) {
		x, y := r.cells[cellKey("", s.who, us)], r.cells[cellKey("", s.who, s.metric)]
		if x == nil || y == nil {
			continue
		}
		n := 0
		if strings.HasSuffix(r.label, "x 128") {
			n = 1
		}
		sets[n] = append(sets[n], plotter.XY{X: x.Value, Y: q.picture.value(y)})
	}
	most := 0.0
	for n, xy := range sets {
		if len(xy) == 0 {
			continue
		}
		points, err := plotter.NewScatter(xy)
		if err != nil {
			return err
		}
		points.Color, points.Shape, points.Radius = palette[n], draw.CircleGlyph{}, vg.Points(1.5)
		p.Add(points)
		p.Legend.Add([]string{"heads of 64", "heads of 128"}[n], points)
		for _, v := range xy {
			most = max(most, v.X)
		}
	}
	if most == 0 {
		return fmt.Errorf("there is nothing to draw")
	}
	line, err := plotter.NewLine(plotter.XYs{{X: p.X.Min, Y: q.picture.limit()}, {X: most, Y: q.picture.limit()}})
	if err != nil {
		return err
	}
	line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
	p.Add(line)
	p.Legend.Add("bar", line)
	p.Legend.Top = !q.picture.percent
	return nil
}
