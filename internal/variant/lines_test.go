package variant

import "testing"

func TestLines(t *testing.T) {
	for index, want := range map[string]Line{
		"head": HeadLine, "3": HeadLine, "key": KeyLine, "i[key]": KeyLine, "min(query, 9) + head": QueryLine,
		"query - key": DistanceLine, "min(abs(key - query), 31)": DistanceLine, "i[max(query + head - key - 1, 0)]": DistanceLine,
		"query": QueryLine, "query + key": AnyLine, "max(query - key, 0) + key": AnyLine, "query*2 - key*2": AnyLine, "floor(score)": AnyLine, "i[min(query, key)]": AnyLine,
	} {
		p, err := New(Source{Score: "score + x[" + index + "]*float(key) + float(i[0])", Tensors: []Declared{{Name: "x", Rank: 1}, {Name: "i", Rank: 1, Int: true}}})
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Partials) != 1 || p.LineOf(p.Partials[0]) != want {
			t.Errorf("%s: %v, want %v", index, p.LineOf(p.Partials[0]), want)
		}
	}
}
