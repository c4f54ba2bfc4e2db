package plural

import "testing"

func TestMend(t *testing.T) {
	for message, want := range map[string]string{
		"1 pages of 1 tokens needed, 0 of 1 free":        "1 page of 1 token needed, 0 of 1 free",
		"11 pages, 21 layers, 0.1 tokens, -1 rows, v1 s": "11 pages, 21 layers, 0.1 tokens, -1 rows, v1 s",
		"the cache's 1 KV heads need 1 columns":          "the cache's 1 KV head need 1 column",
		"(1 bytes) 1 biases of 1 layers":                 "(1 byte) 1 bias of 1 layer",
		"rank 1 shapes, layer 1 has 2 heads":             "rank 1 shapes, layer 1 has 2 heads",
		"":                                               "",
	} {
		if got := Mend(message); got != want {
			t.Errorf("%q: %q, want %q", message, got, want)
		}
	}
}
