package serve

import (
	_ "embed"
	"net/http"
)

// The page at / and its parts.
var (
	//go:embed page.html
	pageHTML []byte
	//go:embed page.css
	pageCSS []byte
	//go:embed page.js
	pageJS []byte
)

// file returns the answer of a part of the page.
func file(kind string, data []byte) func(*Server, http.ResponseWriter, *http.Request, []byte) error {
	return func(_ *Server, w http.ResponseWriter, _ *http.Request, _ []byte) error {
		h := w.Header()
		h.Set("Content-Type", kind+"; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-cache")
		if _, err := w.Write(data); err != nil {
			return begunError{err}
		}
		return nil
	}
}
